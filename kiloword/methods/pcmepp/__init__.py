"""PCME++ (arXiv:2305.18171): preset, and the matching loss with pseudo-positives."""
