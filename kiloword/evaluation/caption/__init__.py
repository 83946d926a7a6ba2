"""The task `caption`: captions of a model against those that people wrote."""
