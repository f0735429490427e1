"""Grafana's panels, as far as ours need them: a value for each, and its JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
GREEN, YELLOW, ORANGE, RED, PURPLE = "green", "yellow", "orange", "red", "purple"
Steps = tuple[tuple[float | None, str], ...]
"""Colours from a value up; the first has no value."""


@dataclass(frozen=True, slots=True)
class Query:
    """One expression of a panel."""

    expr: str
    legend: str = ""
    """`{{label}}` stands for a label's value."""
    instant: bool = False
    """Only now, as a table."""

    def to_json(self, ref: str) -> dict[str, Any]:
        asked = {"instant": True, "format": "table"} if self.instant else {"range": True, "format": "time_series"}
        return {"refId": ref, "datasource": DATASOURCE, "expr": self.expr, "legendFormat": self.legend, **asked}


@dataclass(frozen=True, slots=True)
class Panel:
    """One picture, `width` of 24 columns wide."""

    title: str
    meaning: str
    """Shown behind the (i)."""
    kind: str
    queries: tuple[Query, ...]
    unit: str = "short"
    width: int = 12
    height: int = 8
    options: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Of all fields, beside the unit."""
    overrides: tuple[Mapping[str, Any], ...] = ()
    transformations: tuple[Mapping[str, Any], ...] = ()

    def to_json(self, number: int, x: int, y: int) -> dict[str, Any]:
        return {
            "id": number,
            "type": self.kind,
            "title": self.title,
            "description": self.meaning,
            "gridPos": {"x": x, "y": y, "w": self.width, "h": self.height},
            "datasource": DATASOURCE,
            "targets": [query.to_json(chr(ord("A") + i)) for i, query in enumerate(self.queries)],
            "options": dict(self.options),
            "fieldConfig": {
                "defaults": {"unit": self.unit, **self.defaults},
                "overrides": [dict(each) for each in self.overrides],
            },
            "transformations": [dict(each) for each in self.transformations],
        }


def lines(
    title: str,
    meaning: str,
    *queries: Query,
    unit: str = "short",
    width: int = 12,
    stacked: bool = False,
    least: float | None = None,
    most: float | None = None,
    colours: Mapping[str, str] | None = None,
) -> Panel:
    """Values over time, on top of each other where `stacked`. `colours` are by series."""
    bounds = {name: value for name, value in (("min", least), ("max", most)) if value is not None}
    drawn = {"lineWidth": 1, "fillOpacity": 70 if stacked else 8, "showPoints": "never", "spanNulls": False}
    stacking = {"mode": "normal" if stacked else "none", "group": "A"}
    return Panel(
        title,
        meaning,
        "timeseries",
        queries,
        unit,
        width,
        options={
            "legend": {"displayMode": "table", "placement": "right", "showLegend": True, "calcs": ["lastNotNull"]},
            "tooltip": {"mode": "multi", "sort": "none" if stacked else "desc"},
        },
        defaults={**bounds, "custom": {**drawn, "stacking": stacking}},
        overrides=tuple(_coloured(name, colour) for name, colour in (colours or {}).items()),
    )


def number(title: str, meaning: str, query: Query, *, unit: str = "short", steps: Steps = ((None, GREEN),)) -> Panel:
    """One figure, coloured by its value, with its course behind it."""
    return Panel(
        title,
        meaning,
        "stat",
        (query,),
        unit,
        width=4,
        height=4,
        options={
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
            "colorMode": "value",
            "graphMode": "area",
            "textMode": "value",
        },
        defaults={"color": {"mode": "thresholds"}, "thresholds": thresholds(steps)},
    )


def states(
    title: str,
    meaning: str,
    query: Query,
    *,
    unit: str = "short",
    steps: Steps,
    names: Sequence[str] = (),
    width: int = 24,
    height: int = 8,
) -> Panel:
    """A row a series, coloured over time. `names` are shown for 0, 1, 2, …"""
    mappings = [{"type": "value", "options": {str(i): {"text": name, "index": i} for i, name in enumerate(names)}}]
    return Panel(
        title,
        meaning,
        "state-timeline",
        (query,),
        unit,
        width,
        height,
        options={
            "mergeValues": True,
            "showValue": "never",
            "rowHeight": 0.9,
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": bool(names)},
            "tooltip": {"mode": "single"},
        },
        defaults={
            "color": {"mode": "thresholds"},
            "thresholds": thresholds(steps),
            "mappings": mappings if names else [],
            "custom": {"lineWidth": 0, "fillOpacity": 85},
        },
    )


def grid(
    title: str, meaning: str, query: Query, *, rows: str, columns: str, unit: str, steps: Steps, height: int
) -> Panel:
    """The latest values as a table of coloured cells: a label's values down, another's across, in order of ranks."""
    corner = f"{rows}\\{columns}"  # how Grafana names the first column
    to_number = {"targetField": "rank", "destinationType": "number"}
    return Panel(
        title,
        meaning,
        "table",
        (query,),
        unit,
        height=height,
        options={"showHeader": True, "cellHeight": "sm"},
        defaults={
            "color": {"mode": "thresholds"},
            "thresholds": thresholds(steps),
            "custom": {"align": "center", "cellOptions": {"type": "color-background", "mode": "basic"}},
        },
        overrides=(
            {
                "matcher": {"id": "byName", "options": corner},
                "properties": [{"id": "custom.cellOptions", "value": {"type": "auto"}}],
            },
        ),
        transformations=(
            {"id": "convertFieldType", "options": {"conversions": [to_number]}},
            {"id": "sortBy", "options": {"fields": {}, "sort": [{"field": "rank", "desc": False}]}},
            {"id": "groupingToMatrix", "options": {"rowField": rows, "columnField": columns, "valueField": "Value"}},
        ),
    )


def facts(title: str, meaning: str, query: Query, *, shown: Sequence[str]) -> Panel:
    """The labels of info series as a table, with these columns in this order."""
    return Panel(
        title,
        meaning,
        "table",
        (query,),
        width=24,
        height=4,
        options={"showHeader": True, "cellHeight": "sm"},
        transformations=(
            {"id": "filterFieldsByName", "options": {"include": {"names": list(shown)}}},
            {"id": "organize", "options": {"indexByName": {name: i for i, name in enumerate(shown)}}},
        ),
    )


def thresholds(steps: Steps) -> dict[str, Any]:
    return {"mode": "absolute", "steps": [{"value": value, "color": colour} for value, colour in steps]}


def _coloured(series: str, colour: str) -> dict[str, Any]:
    return {
        "matcher": {"id": "byName", "options": series},
        "properties": [{"id": "color", "value": {"mode": "fixed", "fixedColor": colour}}],
    }
