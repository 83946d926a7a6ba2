"""Ranks and devices: collectives, gathering, sharding, launch, defaults by device, heartbeat and failure diagnosis."""
