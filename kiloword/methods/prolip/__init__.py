"""ProLIP (arXiv:2410.18857): preset, Gaussian head, inclusion terms, the variant that its authors released."""
