"""`kiloword mine`: find captions of a data set that match other images (FFF, arXiv:2405.10286)."""
