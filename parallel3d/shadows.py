"""Fails the import of parallel3d if a user's file hides one of our packages that have common names."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from pathlib import Path

_COMMON_NAMES = ("runtime", "monitoring", "process_groups")
_HOME = Path(__file__).resolve().parent.parent


def _found(name: str) -> Path | None:
    """The file that `import name` would load in a new process; sys.modules is ignored, as launch preloads ours."""
    spec = importlib.machinery.PathFinder.find_spec(name, sys.path) or importlib.util.find_spec(name)
    if spec is None:
        return None
    place = spec.origin or next(iter(spec.submodule_search_locations or ()), None)
    return Path(place).resolve() if place else None


def refuse_shadows() -> None:
    """Raise ImportError, which names the user's file, if e.g. `import runtime` would load it instead of ours."""
    for name in _COMMON_NAMES:
        found = _found(name)
        ours = _HOME / name / "__init__.py"
        if found is not None and found != ours:
            raise ImportError(
                f"{found} hides parallel3d's own package '{name}' ({ours.parent}).\n"
                f"Rename that file or folder, or take {found.parent} off the import path (sys.path)."
            )
