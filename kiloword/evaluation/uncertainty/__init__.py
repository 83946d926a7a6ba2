"""The task `uncertainty`: what a model's variances say (arXiv:2410.18857, section 4.3)."""
