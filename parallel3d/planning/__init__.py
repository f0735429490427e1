"""What is known of a run before its ranks exist: its blueprint, its checks, its alternatives."""
