"""Rank topology, process groups, and the transports that move their bytes."""
