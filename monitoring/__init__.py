"""Monitoring: records events in ranks, analyses them, and serves the results as metrics, pages and dashboards."""
