"""JSON for browsers: on one line, without NaN and infinity."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def to_text(document: Any) -> str:
    """JSON on one line. NaN and infinity become null; values of other types are written as strings."""
    try:
        return _encode(document)
    except ValueError:  # NaN is rare, and checking every value takes longer than encoding it
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
