"""Llip (arXiv:2405.00740): preset, contextual pooling, exact scores of pairs."""
