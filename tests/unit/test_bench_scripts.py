"""What the scripts in bench/ print, and that each starts."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch

import parallel3d
from parallel3d.config import load_config
from parallel3d.training.coordinator import Coordinator
from tests.support.processes import ROOT, SECONDS

Load = Callable[[str], ModuleType]


@pytest.fixture
def load(monkeypatch) -> Iterator[Load]:
    """Imports a script as if its folder were the current one, for this test alone."""
    monkeypatch.syspath_prepend(ROOT / "bench")
    before = set(sys.modules)
    yield importlib.import_module
    for name in ("common", "collectives", "rank"):
        if name not in before:
            sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("value", "goal", "text"),
    [
        (5.0, {"least": 5}, "(wanted: at least 5; reached)"),
        (4.9, {"least": 5}, "(wanted: at least 5; NOT reached)"),
        (60.0, {"most": 60}, "(wanted: at most 60; reached)"),
        (60.1, {"most": 60}, "(wanted: at most 60; NOT reached)"),
    ],
)
def test_a_goal_is_shown_with_whether_it_was_reached(load, value, goal, text):
    assert load("common").wanted(value, **goal) == text


@pytest.mark.parametrize("script", ["launch.py", "await_overhead.py"])
def test_no_script_names_a_goal_without_that(script):
    assert "(wanted:" not in (ROOT / "bench" / script).read_text()


def test_what_was_not_measured_is_left_out(load):
    module = load("collectives")
    found = {"ranks": 2, "sizes": [], "geometric_mean_mpi": None, "time_per_byte_1MiB_over_256MiB": None}
    assert not any("per byte" in line for line in module.lines_of(found))
    lines = module.lines_of(found | {"time_per_byte_1MiB_over_256MiB": 0.5})
    assert "time per byte, 1 MiB over 256 MiB: 0.50" in lines


@pytest.mark.parametrize("pp", [1, 2])
async def test_the_switch_of_the_monitoring_benchmark(load, monkeypatch, pp):
    monkeypatch.syspath_prepend(ROOT / "bench" / "watching")
    switch_of = load("rank").Switch
    overrides = {"model.args": {"layers": 2, "width": 8, "heads": 1, "sequence": 4}, "parallel.pp": pp}
    config = load_config(None, overrides=overrides, environ={})
    batch = torch.zeros(2, 1, 4, dtype=torch.int64).unbind()

    async def rank() -> list[bool]:
        recorded = []
        async with Coordinator.from_config(config) as coordinator:
            recorder, switch = coordinator.recorder, switch_of(coordinator)
            for on in (True, False, True):
                switch.turn(on)
                recorder.take()
                await coordinator.train_step(batch)
                recorded.append(bool(recorder.take().data))
        return recorded

    assert await parallel3d.in_process(rank, ranks=pp) == [[True, False, True]] * pp


@pytest.mark.slow
@pytest.mark.parametrize(
    "script",
    [
        "collectives",
        "gradient_server",
        "launch",
        *(
            pytest.param(script, marks=pytest.mark.exhaustive)
            for script in ("await_overhead", "monitoring", "pipeline", "training")
        ),
    ],
)
def test_every_script_starts_as_it_says(script):
    """One of them has the name of a package."""
    command = [sys.executable, f"bench/{script}.py", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
    assert (done.returncode, done.stderr) == (0, "")
    assert {"--json", "--quick"} <= set(done.stdout.split())
