"""Ranks, launchers and servers that are killed."""
