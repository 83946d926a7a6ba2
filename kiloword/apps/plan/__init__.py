"""Plan a run before it starts: its memory, arithmetic, traffic and time.

`simulation` measures a micro-batch and the pair loss on tensors without content, which `tracer` counts; `gpu` says what
memory and traffic follow, `advice` what fits and how fast it is, `tables` prints it.
"""
