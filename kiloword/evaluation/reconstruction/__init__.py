"""The task `reconstruction`: masked patches reconstructed from correct and wrong captions."""
