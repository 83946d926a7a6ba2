"""The papers' claims as experiments: `python -m research.NAME` from the root of the repository. Not in the wheel."""
