"""Late interaction of patches and words: FILIP (arXiv:2111.07783), ColBERT (arXiv:2004.12832), ColPali (2407.01449)."""
