"""Sizes as people write them: `64KiB` to 65536 bytes and back. No torch."""

from __future__ import annotations

import re

from runtime.errors import InvalidCall

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMG])(?:iB)?|B)?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes. Units are powers of 1024, and K is KiB as in nccl-tests; what is not is refused."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise InvalidCall(f"--sizes {text.strip()!r} is not a size such as 4, 64KiB or 1.5MiB.")
    size = float(found[1]) * _UNITS[(found[2] or "").upper()]
    if size < 1 or size != int(size):
        raise InvalidCall(f"--sizes {text.strip()!r} is {size:g} bytes; give whole ones, 1 or more.")
    return int(size)


def parse_sizes(text: str) -> tuple[int, ...]:
    """A comma list, in its order; what is given twice counts once."""
    return tuple(dict.fromkeys(parse_size(part) for part in text.split(",")))


def human(num_bytes: float) -> str:
    """In the largest unit that leaves 1 or more: `64 KiB`, `1.5 MiB`."""
    for unit in ("G", "M", "K"):
        if num_bytes >= _UNITS[unit]:
            return f"{num_bytes / _UNITS[unit]:.4g} {unit}iB"
    return f"{num_bytes:.0f} B"
