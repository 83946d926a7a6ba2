"""Training: `loop.py` is the loop, `setup.py` prepares what it uses, `accumulate.py` and `learner.py` are a step."""
