"""Watching runs: curves in the terminal, alerts, a mirror for TensorBoard. No torch here."""
