"""Precomputed features: extraction by a teacher, the store, and the teachers."""
