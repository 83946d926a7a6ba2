"""Ranks and devices: collectives, gathering, sharding, launch, heartbeat and failure diagnosis."""
