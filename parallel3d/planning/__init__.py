"""A run before its ranks exist: its blueprint, checks before the start, predictions for other pipelines."""
