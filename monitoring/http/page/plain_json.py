"""JSON as browsers read it: no NaN, no infinity, nothing that could end a script or a line of a stream."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def to_text(document: Any) -> str:
    """On one line. Numbers that JSON does not have become null; what is no JSON value is written as text."""
    try:
        return _encode(document)
    except ValueError:  # such a number is rare, and a look at every value takes longer than to write it
        return _encode(_plain(document))


def _plain_or_text(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else str(value)


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value


_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False, default=_plain_or_text).encode
