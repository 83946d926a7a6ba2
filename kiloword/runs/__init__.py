"""Runs as they train and beside each other: rows, alerts, trackers, compare, watch. No torch here."""
