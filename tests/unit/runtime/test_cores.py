"""Cores are counted as the machine and its control groups give them."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from runtime import cores


def written(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def own(tmp_path: Path, *lines: str) -> Path:
    (tmp_path / "own").write_text("".join(f"{line}\n" for line in lines))
    return tmp_path / "own"


@pytest.mark.parametrize(("text", "found"), [("max 100000\n", math.inf), ("250000 100000\n", 2.5), ("?", math.inf)])
def test_version_2(tmp_path, text, found):
    written(tmp_path, cpu__max=text)
    assert cores.quota(tmp_path, own(tmp_path, "0::/")) == found


def test_the_least_of_all_groups_above_counts(tmp_path):
    written(tmp_path / "a", cpu__max="100000 100000")
    written(tmp_path / "a" / "b", cpu__max="400000 100000")
    assert cores.quota(tmp_path, own(tmp_path, "0::/a/b")) == 1
    assert cores.quota(tmp_path, own(tmp_path, "0::/elsewhere/b")) == math.inf


@pytest.mark.parametrize("controllers", ["cpu", "cpu,cpuacct"])
def test_version_1(tmp_path, controllers):
    """As in a container: it knows its group's name outside, and finds it at the root."""
    written(tmp_path / "cpu", cpu__cfs_quota_us="150000\n", cpu__cfs_period_us="100000\n")
    lines = own(tmp_path, "7:memory:/outside", f"2:{controllers}:/outside/this", "0::/")
    assert cores.quota(tmp_path, lines) == 1.5
    written(tmp_path / "cpu", cpu__cfs_quota_us="-1\n")
    assert cores.quota(tmp_path, lines) == math.inf


def test_without_control_groups(tmp_path):
    assert cores.quota(tmp_path, tmp_path / "nothing") == math.inf


@pytest.mark.parametrize(("quota", "found"), [(math.inf, 8), (2.5, 3), (0.1, 1), (64.0, 8)])
def test_a_part_of_a_core_counts_as_one(monkeypatch, quota, found):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(cores, "quota", lambda: quota)
    assert cores.num_cores() == found
