"""The ranks' own endpoints, as Prometheus' HTTP service discovery lists them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from monitoring.live.observer import Observer

_TARGET = re.compile(r"(?:[A-Za-z0-9._-]{1,253}|\[[0-9a-f:]{2,39}\]):[0-9]{1,5}", re.ASCII)


class ScrapeTargets:
    """Takes ranks' `endpoint` messages: {"target": "127.0.0.1:40123", "scheme": "http"}."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._found: dict[int, tuple[str, str]] = {}

    def take(self, rank: int, message: Mapping[str, Any]) -> None:
        match message:
            case {"kind": "endpoint", "target": str(target), "scheme": "http" | "https" as scheme}:
                if _TARGET.fullmatch(target):
                    self._found[rank] = target, scheme

    def listed(self) -> list[dict[str, Any]]:
        """One group for each rank, with where it sits as labels."""
        return [
            {"targets": [target], "labels": {"__scheme__": scheme, **self._labels(rank)}}
            for rank, (target, scheme) in sorted(self._found.items())
        ]

    def _labels(self, rank: int) -> dict[str, str]:
        labels = {"run_id": self._observer.facts.run_id, "rank": str(rank)}
        facts = self._observer.ranks.get(rank)
        if facts is not None:
            labels |= {axis: str(place) for axis, place in facts.place._asdict().items()}
            labels["host"] = facts.host
        return labels
