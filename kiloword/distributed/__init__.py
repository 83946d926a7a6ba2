"""Ranks and devices: collectives, gathering, sharding, launch, defaults by device."""
