"""Numbers with a unit, as people write them: `64 KiB` in bytes, `2min` in seconds. Neither torch nor pydantic."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction

BYTES = {
    "b": 1,
    **{f"{letter}ib": 1 << (10 * power) for power, letter in enumerate("kmgt", 1)},
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)},
}
SECONDS = {"ms": 1e-3, "s": 1.0, "sec": 1.0, "min": 60.0, "h": 3600.0}
LARGEST_SIZE = (1 << 63) - 1  # bytes: what an offset in a file or a tensor can hold

_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)", re.ASCII)
# A float holds them all; with some 300 digits it would be infinite.
_LONGEST = 64


def in_base_unit(text: str, units: Mapping[str, float]) -> float | None:
    """The number times its unit, in either case of letters; None where it is neither. A bare number needs a unit ""."""
    match = _QUANTITY.fullmatch(text.strip()) if len(text) <= _LONGEST else None
    factor = units.get(match[2].lower()) if match else None
    # Exactly, or 4.1 KB would be a little less than 4100 bytes.
    return float(Fraction(match[1]) * Fraction(factor)) if match and factor is not None else None
