"""JSON with a key a line, and of a list of lists or objects an entry a line: short, and still to be read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def dump(document: Mapping[str, Any]) -> str:
    """The object as text."""
    entries = (f"  {json.dumps(key)}: {_value(value)}" for key, value in document.items())
    return "{\n" + ",\n".join(entries) + "\n}"


def _value(value: Any) -> str:
    if isinstance(value, list) and value and all(isinstance(entry, list | dict) for entry in value):
        return "[\n" + ",\n".join(f"    {json.dumps(entry)}" for entry in value) + "\n  ]"
    return json.dumps(value)
