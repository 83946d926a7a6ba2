"""The task `retrieval`: both ways, many captions an image, in two stages where asked."""
