"""Processes: event loop, launch and supervision, control channel, errors, logs, the gradient server."""
