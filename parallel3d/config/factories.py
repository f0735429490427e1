"""Finds the module of a `package.module:name` without importing anything, not even its packages."""

from __future__ import annotations

import os
import pkgutil
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from typing import NamedTuple

from parallel3d.config.errors import nearest


class Missing(NamedTuple):
    """The part of a module's name that is not there."""

    message: str
    remedy: str


def missing_module(factory: str) -> Missing | None:
    """Why the factory's module cannot be found, or None when it can."""
    name = factory.partition(":")[0]
    top, *rest = name.split(".")
    # `python -m` looks in the current folder first; an installed command does not have it on its path.
    current = _current_folder()
    path = [*current, *sys.path]
    spec = PathFinder.find_spec(top, path) or _from_other_finders(top)
    if spec is None:
        return Missing(f"no module named {top} in the current folder or installed.", _similar(top, current, ""))
    return _missing_below(top, spec, rest)


def _current_folder() -> list[str]:
    try:
        return [os.getcwd()]
    except FileNotFoundError:  # somebody removed it
        return []


def _missing_below(parent: str, spec: ModuleSpec, rest: Sequence[str]) -> Missing | None:
    for part in rest:
        if spec.submodule_search_locations is None:
            return Missing(
                f"{parent} is a module, not a package.",
                f"Remove .{part} and what follows it, up to the colon.",
            )
        locations = list(spec.submodule_search_locations)
        # The last part alone: with the full name, a folder without __init__ would ask for its
        # parent in sys.modules, which only an import puts there.
        found = PathFinder.find_spec(part, locations)
        if found is None:
            return Missing(f"no module named {part} in the package {parent}.", _similar(part, locations, f"{parent}."))
        parent, spec = f"{parent}.{part}", found
    return None


def _from_other_finders(name: str) -> ModuleSpec | None:
    """Built-in modules, and packages installed for editing, which bring a finder of their own."""
    specs = (finder.find_spec(name, None) for finder in sys.meta_path)
    return next((spec for spec in specs if spec is not None), None)


def _similar(name: str, locations: list[str], prefix: str) -> str:
    similar = nearest(name, (module.name for module in pkgutil.iter_modules(locations)))
    return f"Did you mean {prefix}{similar}?" if similar else "Check the name, or install the package it is in."
