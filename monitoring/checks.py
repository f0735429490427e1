"""Checks for untrusted values from ranks: each returns a valid value, and raises ValueError otherwise."""

from __future__ import annotations

import math
from typing import Any


def whole_number(value: Any) -> int:
    if type(value) is not int:
        raise ValueError(f"{value!r} is no whole number")
    return value


def count(value: Any) -> int:
    """An integer >= 0."""
    if whole_number(value) < 0:
        raise ValueError(f"{value!r} is below zero")
    return int(value)


def number(value: Any) -> float:
    """Accepts NaN and infinity, because a loss can be either."""
    if type(value) not in (int, float):
        raise ValueError(f"{value!r} is no number")
    return float(value)


def finite(value: Any) -> float:
    if not math.isfinite(number(value)):
        raise ValueError(f"{value!r} is not finite")
    return float(value)


def text(value: Any) -> str:
    """The first 200 characters."""
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is no text")
    return value[:200]


def or_null(value: float) -> float | None:
    """None for NaN and infinity, which JSON does not have."""
    return value if math.isfinite(value) else None
