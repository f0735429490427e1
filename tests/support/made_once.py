"""Folders that are costly to make: once for all workers of a test run."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """A folder of this name that `make` has filled; whoever else asks for it waits until it is whole."""
    place = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # a worker has a folder of its own within the run's
        place = place.parent
    folder, partial = place / name, place / f"{name}-partial"
    with (place / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            partial.mkdir()  # one that failed stays, and fails whoever else asks
            make(partial)
            partial.rename(folder)
    return folder
