"""HTTP for a run: the endpoint, its access control, and the live page."""
