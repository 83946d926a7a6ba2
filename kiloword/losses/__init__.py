"""Losses of all pairs, computed a block at a time."""
