"""What events mean: where a step's time went, who is slow, what would help. Pure."""
