"""Training: `loop.py` is the loop, `setup.py` prepares what it uses, `step.py` is a step."""
