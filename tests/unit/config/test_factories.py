"""Modules of factories are found where Python would find them, and never imported."""

from __future__ import annotations

import sys

import pytest

from parallel3d.config import load_config

BOMB = "raise SystemExit('this module must not be imported')\n"


@pytest.fixture
def package(here):
    """The package `mine_3d` with a module `nets`, a folder without __init__ `deep`, and `deep/er.py`."""
    folder = here / "mine_3d"
    (folder / "deep" / "down").mkdir(parents=True)
    for name in ("__init__.py", "nets.py", "deep/er.py", "deep/down/under.py"):
        (folder / name).write_text(BOMB)
    (here / "single_3d.py").write_text(BOMB)
    return folder


@pytest.mark.parametrize(
    "module",
    [
        "mine_3d",
        "mine_3d.nets",
        "mine_3d.deep.er",
        "mine_3d.deep.down.under",
        "single_3d",
        "json.decoder",
        "sys",
    ],
)
@pytest.mark.parametrize("key", ["model.factory", "model.loss", "data.factory"])
def test_a_module_is_found_but_not_imported(module, key, package):
    before = set(sys.modules)
    load_config(None, overrides={key: f"{module}:build"}, environ={})
    assert set(sys.modules) == before


CASES = [
    (
        "nowhere_3d:f",
        "no module named nowhere_3d in the current folder or installed.",
        "Check the name, or install the package it is in.",
    ),
    ("mine_3b:f", "no module named mine_3b in the current folder or installed.", "Did you mean mine_3d?"),
    ("mine_3d.net:f", "no module named net in the package mine_3d.", "Did you mean mine_3d.nets?"),
    (
        "mine_3d.deep.zz:f",
        "no module named zz in the package mine_3d.deep.",
        "Check the name, or install the package it is in.",
    ),
    (
        "single_3d.x:f",
        "single_3d is a module, not a package.",
        "Remove .x and what follows it, up to the colon.",
    ),
]


@pytest.mark.parametrize(("factory", "message", "remedy"), CASES)
@pytest.mark.parametrize(("section", "key"), [("model", "factory"), ("model", "loss"), ("data", "factory")])
def test_a_module_that_is_not_found(section, key, factory, message, remedy, package, refused):
    place = f"run.yaml:1:{len(section) + len(key) + 6}"
    assert refused(f"{section}: {{{key}: '{factory}'}}") == (
        f'{place}  {section}.{key} = "{factory}": {message}\n{" " * len(place)}  {remedy}'
    )
