"""The conformity suite: what must hold for every method."""
