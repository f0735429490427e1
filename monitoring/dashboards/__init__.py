"""Grafana dashboards and Prometheus rules for a mesh, and what starts both: text in, files out."""

from monitoring.dashboards.files import files_for, write_files
from monitoring.dashboards.setup import Setup
from monitoring.dashboards.target import Target

__all__ = ["Setup", "Target", "files_for", "write_files"]
