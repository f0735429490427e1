"""Configuration of Prometheus and Grafana, and the compose file that starts them beside a run."""

from __future__ import annotations

from typing import Any

from monitoring.dashboards.dashboard import TAG
from monitoring.dashboards.setup import Setup
from monitoring.dashboards.target import Target

DASHBOARDS_IN_GRAFANA = "/etc/parallel3d/dashboards"
_PROMETHEUS_IMAGE, _GRAFANA_IMAGE = "prom/prometheus:v2.53.4", "grafana/grafana:11.6.0"
_PYTHON_IMAGE = "python:3.13-slim"
_PROMETHEUS_PORT, _GRAFANA_PORT = 9090, 3000
_PACKAGES = "\n".join(f"COPY {name} {name}" for name in ("monitoring", "runtime", "process_groups", "parallel3d"))
_DOCKERFILE = f"""\
FROM {_PYTHON_IMAGE}
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
{_PACKAGES}
RUN pip install --no-cache-dir . --extra-index-url https://download.pytorch.org/whl/cpu
"""


def prometheus(setup: Setup) -> dict[str, Any]:
    """prometheus.yml."""
    access = _access(setup.target)
    run: dict[str, Any] = {
        "job_name": TAG,
        **({"scheme": "https"} if setup.target.tls else {}),
        **access,
        "static_configs": [{"targets": [setup.target.address]}],
    }
    # Ranks ask for what the run asks for; by which scheme, the list tells of each.
    ranks = {
        "job_name": f"{TAG}-ranks",
        **access,
        "http_sd_configs": [{"url": f"{setup.target.url}/sd", "refresh_interval": "30s", **access}],
    }
    return {
        "global": {"scrape_interval": f"{setup.interval}s", "evaluation_interval": f"{setup.interval}s"},
        "rule_files": ["recording.rules.yml", "alerts.rules.yml"],
        "scrape_configs": [run, ranks] if setup.per_rank else [run],
    }


def _access(target: Target) -> dict[str, Any]:
    """What `/metrics` asks for where it is not on loopback."""
    access: dict[str, Any] = {}
    if target.token_file is not None:
        access["authorization"] = {"type": "Bearer", "credentials_file": target.token_file}
    if target.ca_file is not None:
        access["tls_config"] = {"ca_file": target.ca_file}
    return access


def datasources(setup: Setup) -> dict[str, Any]:
    """For Grafana's provisioning."""
    source = {
        "name": setup.datasource,
        "uid": "parallel3d-prometheus",
        "type": "prometheus",
        "access": "proxy",
        "url": f"http://127.0.0.1:{_PROMETHEUS_PORT}",
        "isDefault": True,
        "jsonData": {"timeInterval": f"{setup.interval}s", "httpMethod": "POST"},
    }
    return {"apiVersion": 1, "datasources": [source]}


def dashboard_provider() -> dict[str, Any]:
    """For Grafana's provisioning."""
    provider = {
        "name": TAG,
        "folder": TAG,
        "type": "file",
        "updateIntervalSeconds": 30,
        "allowUiUpdates": False,
        "options": {"path": DASHBOARDS_IN_GRAFANA},
    }
    return {"apiVersion": 1, "providers": [provider]}


def compose(setup: Setup) -> dict[str, Any]:
    """Run, Prometheus and Grafana in one network namespace, so that the run's endpoint can stay on loopback there.

    The namespace is Prometheus': a run ends, and what it was shall still be seen. A run elsewhere is not started.
    """
    run = {"run": _run(setup)} if setup.runs_here else {}
    return {
        "name": TAG,
        "services": {**run, "prometheus": _prometheus_service(setup.target), "grafana": _grafana_service()},
        "volumes": {"prometheus-data": {}, "grafana-data": {}},
    }


def _run(setup: Setup) -> dict[str, Any]:
    settings = (*setup.settings, f"monitoring.port={setup.target.port}")
    return {
        "build": {
            "context": "${PARALLEL3D_SOURCE:?set it to the folder with the sources of parallel3d}",
            "dockerfile_inline": _DOCKERFILE,
        },
        "network_mode": "service:prometheus",
        "depends_on": ["prometheus"],
        "user": "${PARALLEL3D_USER:-1000:1000}",
        "environment": {"HOME": "/tmp"},
        "working_dir": "/project",
        "volumes": ["${PARALLEL3D_PROJECT:-.}:/project"],
        "command": ["parallel3d", "run", "run.yaml", *(word for each in settings for word in ("--set", each))],
        "init": True,
    }


def _prometheus_service(target: Target) -> dict[str, Any]:
    """With the files that it needs to be let in, where they are not beside its configuration."""
    secrets = [path for path in (target.token_file, target.ca_file) if path is not None and path.startswith("/")]
    return {
        "image": _PROMETHEUS_IMAGE,
        "command": [
            "--config.file=/etc/prometheus/prometheus.yml",
            "--storage.tsdb.path=/prometheus",
            "--storage.tsdb.retention.time=30d",
        ],
        "volumes": [
            "./prometheus:/etc/prometheus:ro",
            "prometheus-data:/prometheus",
            *(f"{path}:{path}:ro" for path in secrets),
        ],
        "ports": [f"127.0.0.1:{port}:{port}" for port in (_PROMETHEUS_PORT, _GRAFANA_PORT)],
        "restart": "unless-stopped",
    }


def _grafana_service() -> dict[str, Any]:
    """Anybody on this host may look, and nobody can log in: there is no password to change."""
    return {
        "image": _GRAFANA_IMAGE,
        "network_mode": "service:prometheus",
        "depends_on": ["prometheus"],
        "environment": {
            "GF_AUTH_ANONYMOUS_ENABLED": "true",
            "GF_AUTH_ANONYMOUS_ORG_ROLE": "Viewer",
            "GF_AUTH_BASIC_ENABLED": "false",
            "GF_AUTH_DISABLE_LOGIN_FORM": "true",
            "GF_ANALYTICS_REPORTING_ENABLED": "false",
            "GF_ANALYTICS_CHECK_FOR_UPDATES": "false",
            "GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH": f"{DASHBOARDS_IN_GRAFANA}/run.json",
        },
        "volumes": [
            "./grafana/provisioning:/etc/grafana/provisioning:ro",
            f"./grafana/dashboards:{DASHBOARDS_IN_GRAFANA}:ro",
            "grafana-data:/var/lib/grafana",
        ],
        "restart": "unless-stopped",
    }
