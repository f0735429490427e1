"""JSON as browsers read it: no NaN, no infinity, nothing that could end a script or a line of a stream."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def to_text(document: Any) -> str:
    """On one line. Numbers that JSON does not have become null; what is no JSON value is written as text."""
    return json.dumps(_plain(document), separators=(",", ":"), allow_nan=False, default=str)


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value
