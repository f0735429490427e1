"""A run while it goes on: the observer of its ranks' messages, and the thread it lives in."""
