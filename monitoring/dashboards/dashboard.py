"""A dashboard's frame: panels in rows, the variables they share, and links to the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from monitoring.dashboards.expressions import Expressions
from monitoring.dashboards.panels import DATASOURCE, Panel
from monitoring.dashboards.setup import Setup

TAG = "parallel3d"
COLUMNS = 24
SHOWN = Expressions(where='instance=~"$instance"')
"""What panels ask for: the run that is chosen above them, with Grafana's own window for rates."""
_SCHEMA = 39  # Grafana 11's; later ones read it too


@dataclass(frozen=True, slots=True)
class Section:
    """Panels under one heading."""

    title: str
    panels: Sequence[Panel]


@dataclass(frozen=True, slots=True)
class Dashboard:
    """Its uid is part of links that people keep, so it never changes."""

    uid: str
    title: str
    meaning: str
    sections: Sequence[Section]

    def to_json(self, setup: Setup) -> dict[str, Any]:
        return {
            "uid": self.uid,
            "title": self.title,
            "description": f"{self.meaning} For {setup.mesh}. Written by `parallel3d dashboards`.",
            "tags": [TAG],
            "schemaVersion": _SCHEMA,
            "version": 1,
            "editable": True,
            "graphTooltip": 1,
            "refresh": f"{setup.interval}s",
            "time": {"from": "now-30m", "to": "now"},
            "timezone": "browser",
            "links": [_link_to_others()],
            "annotations": {"list": [_starts()]},
            "templating": {"list": [_datasource(setup), _instance()]},
            "panels": list(laid_out(self.sections)),
        }


def laid_out(sections: Sequence[Section]) -> Iterator[dict[str, Any]]:
    """Each section's heading, then its panels from left to right, in as many rows as they need."""
    number, y = 0, 0
    for section in sections:
        number += 1
        yield _heading(section.title, number, y)
        x, y, height = 0, y + 1, 0
        for panel in section.panels:
            if x + panel.width > COLUMNS:
                x, y, height = 0, y + height, 0
            number += 1
            yield panel.to_json(number, x, y)
            x, height = x + panel.width, max(height, panel.height)
        y += height


def _heading(title: str, number: int, y: int) -> dict[str, Any]:
    place = {"x": 0, "y": y, "w": COLUMNS, "h": 1}
    return {"id": number, "type": "row", "title": title, "gridPos": place, "collapsed": False, "panels": []}


def _datasource(setup: Setup) -> dict[str, Any]:
    return {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
        "current": {"text": setup.datasource, "value": setup.datasource},
        "refresh": 1,
    }


def _instance() -> dict[str, Any]:
    """Endpoints that have served a run; those of single ranks are none."""
    return {
        "name": "instance",
        "label": "Run at",
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": "label_values(parallel3d_run_info, instance)", "refId": "instance"},
        "definition": "label_values(parallel3d_run_info, instance)",
        "refresh": 2,
        "sort": 1,
        "multi": False,
        "includeAll": False,
    }


def _starts() -> dict[str, Any]:
    return {
        "name": "Starts",
        "datasource": DATASOURCE,
        "enable": True,
        "iconColor": "blue",
        "expr": f"{SHOWN.series('start_time_seconds')} * 1000",
        "useValueForTime": "on",
        "titleFormat": "Run started",
    }


def _link_to_others() -> dict[str, Any]:
    return {
        "type": "dashboards",
        "title": "parallel3d",
        "tags": [TAG],
        "asDropdown": False,
        "includeVars": True,
        "keepTime": True,
    }
