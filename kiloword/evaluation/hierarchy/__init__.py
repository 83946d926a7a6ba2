"""The task `hierarchy`: general and specific captions (arXiv:2410.18857)."""
