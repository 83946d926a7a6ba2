"""Sweeps: `train` for every combination of values and every seed, and one table of all. No torch at import."""
