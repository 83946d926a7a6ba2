"""The task `retrieval`: image and text retrieval, optionally in two stages."""
