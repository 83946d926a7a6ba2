"""Sweeps: one training command with settings varied, each over seeds, and a table and plots of the results."""
