"""Looking at runs while they train: curves in the terminal, alerts, a mirror for TensorBoard. No torch here."""
