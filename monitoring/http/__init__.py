"""HTTP for a run: the endpoint, who may use it, and the live page."""
