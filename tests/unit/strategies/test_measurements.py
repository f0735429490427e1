"""What an earlier run has measured is found again by a run like it, and by no other."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from process_groups.strategies import measurements
from process_groups.strategies.measurements import layout_of, load, save
from runtime import cores

CANDIDATES = ("default", "ring")
ROWS = {12: [1e-6, 2e-6], 20: [0.5, math.inf]}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "parallel3d" / "all-reduce.json"


@pytest.mark.parametrize(
    ("hosts", "layout"),
    [
        ((0, 0, 0), "gloo, 3 ranks"),
        ((0, 0, 2, 2), "gloo, 2 + 2 ranks"),
        ((0, 1, 0, 0), "gloo, 3 + 1 ranks"),
    ],
)
def test_groups_alike(hosts, layout):
    assert layout_of("gloo", hosts) == layout


def test_what_is_kept_is_found():
    save("here", CANDIDATES, ROWS)
    assert load("here", CANDIDATES) == ROWS
    assert load("there", CANDIDATES) is None
    assert load("here", (*CANDIDATES, "tree")) is None


def test_layouts_are_kept_beside_each_other():
    save("here", CANDIDATES, ROWS)
    save("there", CANDIDATES, {12: [3.0, 4.0]})
    save("here", CANDIDATES, {12: [5.0, 6.0]})
    assert load("here", CANDIDATES) == {12: [5.0, 6.0]}
    assert load("there", CANDIDATES) == {12: [3.0, 4.0]}


def test_another_kind_of_host_measures_for_itself(monkeypatch):
    save("here", CANDIDATES, ROWS)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(1000)))
    assert "x 1000, torch " in measurements.host_kind()
    assert load("here", CANDIDATES) is None


def test_so_does_a_container_with_another_quota(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(1000)))
    for quota, rows in ((math.inf, ROWS), (1.5, {12: [3.0, 4.0]})):
        monkeypatch.setattr(cores, "quota", lambda quota=quota: quota)
        assert load("here", CANDIDATES) is None
        save("here", CANDIDATES, rows)
    assert "x 2, torch " in measurements.host_kind()
    assert load("here", CANDIDATES) == {12: [3.0, 4.0]}
    monkeypatch.setattr(cores, "quota", lambda: math.inf)
    assert load("here", CANDIDATES) == ROWS


def test_a_user_without_a_home_keeps_nothing(monkeypatch):
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", nowhere)
    save("here", CANDIDATES, ROWS)
    assert load("here", CANDIDATES) is None


def test_nothing_was_kept():
    assert load("here", CANDIDATES) is None


def entry(**changes: object) -> str:
    kept = {"candidates": list(CANDIDATES), "seconds": {"12": [1.0, 2.0]}, **changes}
    return json.dumps({measurements._key("here"): kept})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '"text"',
        "\0\xff",
        entry(candidates=None),
        entry(candidates=["ring", "default"]),
        entry(seconds=None),
        entry(seconds={}),
        entry(seconds=[1.0]),
        entry(seconds={"12": 1.0}),
        entry(seconds={"12": [1.0]}),
        entry(seconds={"12": [1.0, 2.0, 3.0]}),
        entry(seconds={"12": [1.0, "fast"]}),
        entry(seconds={"12": [1.0, -2.0]}),
        entry(seconds={"12": [0, 1.0]}),
        entry(seconds={"12": [1.0, float("nan")]}),
        entry(seconds={"large": [1.0, 2.0]}),
        entry(seconds={"12": [1.0, [2.0]]}),
    ],
)
def test_a_broken_file_is_ignored_and_replaced(cache, text):
    cache.parent.mkdir()
    cache.write_text(text, encoding="latin-1")
    assert load("here", CANDIDATES) is None
    save("here", CANDIDATES, ROWS)
    assert load("here", CANDIDATES) == ROWS
    assert os.listdir(cache.parent) == [cache.name]


def test_a_folder_that_cannot_be_written_is_no_error(cache):
    cache.parent.write_text("a file where the folder should be")
    save("here", CANDIDATES, ROWS)
    assert load("here", CANDIDATES) is None


def test_without_a_variable_it_is_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    save("here", CANDIDATES, ROWS)
    assert (tmp_path / ".cache" / "parallel3d" / "all-reduce.json").exists()
