"""Sizes as people write them: `64KiB` to 65536 bytes and back. No torch."""

from __future__ import annotations

import reprlib

from parallel3d.formatting import BYTES, LARGEST_SIZE, in_base_unit
from runtime.errors import InvalidCall

_UNITS = {"": 1, **{letter: BYTES[f"{letter}ib"] for letter in "kmg"}, **BYTES}


def parse_size(text: str) -> int:
    """Bytes. KiB is 1024 and KB 1000 as in the YAML file, K is KiB as in nccl-tests."""
    size, shown = in_base_unit(text, _UNITS), reprlib.repr(text.strip())
    if size is None:
        raise InvalidCall(f"--sizes {shown} is not a size such as 4, 64KiB or 1.5MiB.")
    if size < 1 or not size.is_integer():
        raise InvalidCall(f"--sizes {shown} is {size:g} bytes; give whole ones, 1 or more.")
    if size > LARGEST_SIZE:
        raise InvalidCall(f"--sizes {shown} is more than any memory; give less than 8 EiB.")
    return int(size)


def parse_sizes(text: str) -> tuple[int, ...]:
    """A comma list, in its order; what is given twice counts once."""
    return tuple(dict.fromkeys(parse_size(part) for part in text.split(",")))


def human(num_bytes: float) -> str:
    """In the largest unit that leaves 1 or more: `64 KiB`, `1.5 MiB`; in KB and MB where only those come out even."""
    ending = "B" if num_bytes % 1000 == 0 and num_bytes % 1024 else "iB"
    for letter in "GMK":
        unit = BYTES[f"{letter}{ending}".lower()]
        if num_bytes >= unit:
            return f"{num_bytes / unit:.4g} {letter}{ending}"
    return f"{num_bytes:.0f} B"
