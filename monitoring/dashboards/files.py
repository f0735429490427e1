"""The folder that `parallel3d dashboards` writes: every file's text, and how it gets there."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from monitoring.dashboards import services
from monitoring.dashboards.alert_rules import alert_rules
from monitoring.dashboards.dashboard import Dashboard
from monitoring.dashboards.mesh_dashboard import mesh_dashboard
from monitoring.dashboards.ranks_dashboard import ranks_dashboard
from monitoring.dashboards.recording_rules import recording_rules
from monitoring.dashboards.run_dashboard import run_dashboard
from monitoring.dashboards.setup import Setup

MARK = "Written by `parallel3d dashboards`"
"""In every file of ours: what has it may be written over."""
_RUN_IT = """\
#   PARALLEL3D_SOURCE=/path/to/parallel3d docker compose up
# builds an image from those sources and runs run.yaml; Grafana is then at http://127.0.0.1:3000. The file is looked for
# beside this one, or in PARALLEL3D_PROJECT, the folder with your own model and data. What the run writes there belongs
# to PARALLEL3D_USER, 1000:1000 unless you set it.
"""
_LOOK_ONLY = """\
#   docker compose up
# starts Prometheus, which asks {target}, and Grafana at http://127.0.0.1:3000.
"""


def files_for(setup: Setup, run_yaml: str | None = None) -> dict[str, str]:
    """Text by path. The same bytes for the same setup. `run_yaml` is what the compose file shall run."""
    hint = _RUN_IT if setup.runs_here else _LOOK_ONLY.format(target=setup.target.url)
    texts = {
        "grafana/dashboards/run.json": _json(run_dashboard(), setup),
        "grafana/dashboards/mesh.json": _json(mesh_dashboard(setup), setup),
        "grafana/dashboards/ranks.json": _json(ranks_dashboard(setup), setup),
        "grafana/provisioning/dashboards/parallel3d.yaml": _yaml(services.dashboard_provider(), setup),
        "grafana/provisioning/datasources/parallel3d.yaml": _yaml(services.datasources(setup), setup),
        "prometheus/prometheus.yml": _yaml(services.prometheus(setup), setup),
        "prometheus/recording.rules.yml": _yaml(recording_rules(setup), setup),
        "prometheus/alerts.rules.yml": _yaml(alert_rules(setup), setup),
        "compose.yaml": _yaml(services.compose(setup), setup, hint),
    }
    return texts if run_yaml is None else {**texts, "run.yaml": f"# {MARK}: a copy.\n{run_yaml}"}


def write_files(folder: Path, texts: Mapping[str, str]) -> list[Path]:
    """The paths, as written. Raises FileExistsError, before anything is written, for a file that is not ours."""
    paths = {folder / name: text for name, text in texts.items()}
    for path in paths:
        if path.exists() and MARK not in path.read_text(errors="replace"):
            raise FileExistsError(f"{path} was not written by this command, and is left as it is. Give another folder.")
    for path, text in paths.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, text)
    return list(paths)


def _replace(path: Path, text: str) -> None:
    """Prometheus and Grafana read these files while they run, and never see half of one."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(text)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _json(dashboard: Dashboard, setup: Setup) -> str:
    return json.dumps(dashboard.to_json(setup), indent=2, ensure_ascii=False) + "\n"


def _yaml(content: dict[str, Any], setup: Setup, hint: str = "") -> str:
    body = yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)
    return f"# {MARK} for {setup.mesh}.\n{hint}{body}"


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as they are, and no anchors: Prometheus' own reader takes none."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)
