"""Plan the resources of a run: arithmetic, memory, traffic and time as functions of shapes.

`request` says what is asked, `shapes` what one GPU computes at once, `layers`, `towers`, `heads`, `terms` and `pairs`
what each part of a step costs, `memory` and `traffic` what follows for a GPU, `advice` what fits and how fast it is.
`measure` compares with a real step, `peak` with one on tensors without content; `allocated` counts what torch really
allocates.
"""
