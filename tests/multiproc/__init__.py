"""Real ranks."""
