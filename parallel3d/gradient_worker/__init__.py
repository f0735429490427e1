"""Training through a gradient server."""
