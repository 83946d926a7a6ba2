"""Losses over all pairs of images and texts, computed in blocks."""
