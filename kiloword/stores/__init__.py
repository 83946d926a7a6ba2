"""Precomputed features and tokens: the store, how rows are joined with it, extraction, and the teachers."""
