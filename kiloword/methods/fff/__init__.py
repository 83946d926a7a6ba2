"""FFF (arXiv:2405.10286): preset with many captions and mined positives, and the search of the initial bias."""
