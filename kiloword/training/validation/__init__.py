"""Validation during training: its data sets, their evaluation, the best model, and the end of runs that stall."""
