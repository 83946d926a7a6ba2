"""The task `probe`: linear probes on frozen features."""
