"""A model on disk: folders, adapters, averages and cards, and the states of a run."""
