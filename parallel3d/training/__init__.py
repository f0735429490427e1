"""One rank's training steps: the coordinator, its model, its record of each step."""
