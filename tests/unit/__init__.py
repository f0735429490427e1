"""No processes, no sleeps."""
