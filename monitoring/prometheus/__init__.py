"""Metrics for Prometheus: names, values, and the endpoints to scrape."""
