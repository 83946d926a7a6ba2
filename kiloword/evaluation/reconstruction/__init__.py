"""The task `reconstruction`: hidden patches reconstructed from right and wrong captions."""
