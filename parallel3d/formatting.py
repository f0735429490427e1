"""Numbers with a unit, as `64 KiB` and `2min`, in and out; JSON that people can read. No torch, no pydantic."""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from runtime.errors import InvalidCall

BYTES = {
    "b": 1,
    **{f"{letter}ib": 1 << (10 * power) for power, letter in enumerate("kmgt", 1)},
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)},
}
SECONDS = {"ms": 1e-3, "s": 1.0, "sec": 1.0, "min": 60.0, "h": 3600.0}
LARGEST_SIZE = (1 << 63) - 1  # bytes: what an offset in a file or a tensor can hold

_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)", re.ASCII)
_LONGEST = 64  # characters: a number of some 300 digits would be an infinite float
_SIZES = {"": 1, **{letter: BYTES[f"{letter}ib"] for letter in "kmg"}, **BYTES}


def in_base_unit(text: str, units: Mapping[str, float]) -> float | None:
    """The number times its unit, in upper or lower case; None if it is no such text. A bare number has the unit ""."""
    match = _QUANTITY.fullmatch(text.strip()) if len(text) <= _LONGEST else None
    factor = units.get(match[2].lower()) if match else None
    # Fractions are exact; with floats 4.1 KB would be a little less than 4100 bytes.
    return float(Fraction(match[1]) * Fraction(factor)) if match and factor is not None else None


def parse_size(text: str) -> int:
    """Bytes of a `--sizes` entry. KiB is 1024 and KB 1000 as in the YAML file, K is KiB as in nccl-tests."""
    size, shown = in_base_unit(text, _SIZES), reprlib.repr(text.strip())
    if size is None:
        raise InvalidCall(f"--sizes {shown} is not a size such as 4, 64KiB or 1.5MiB.")
    if size < 1 or not size.is_integer():
        raise InvalidCall(f"--sizes {shown} is {size:g} bytes; give whole ones, 1 or more.")
    if size > LARGEST_SIZE:
        raise InvalidCall(f"--sizes {shown} is more than any memory; give less than 8 EiB.")
    return int(size)


def parse_sizes(text: str) -> tuple[int, ...]:
    """A comma list in its order, without repeats."""
    return tuple(dict.fromkeys(parse_size(part) for part in text.split(",")))


def show_size(num_bytes: float) -> str:
    """In the largest unit that gives 1 or more: `64 KiB`, `1.5 MiB`; in KB and MB where only those come out even."""
    ending = "B" if num_bytes % 1000 == 0 and num_bytes % 1024 else "iB"
    for letter in "GMK":
        unit = BYTES[f"{letter}{ending}".lower()]
        if num_bytes >= unit:
            return f"{num_bytes / unit:.4g} {letter}{ending}"
    return f"{num_bytes:.0f} B"


def json_lines(document: Mapping[str, Any]) -> str:
    """JSON with one key per line and, for a list of lists or objects, one entry per line."""
    entries = (f"  {json.dumps(key)}: {_value(value)}" for key, value in document.items())
    return "{\n" + ",\n".join(entries) + "\n}"


def _value(value: Any) -> str:
    if isinstance(value, list) and value and all(isinstance(entry, list | dict) for entry in value):
        return "[\n" + ",\n".join(f"    {json.dumps(entry)}" for entry in value) + "\n  ]"
    return json.dumps(value)
