"""Live monitoring of a run: the observer of its ranks' messages, and the thread it runs in."""
