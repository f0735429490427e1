"""One script, unchanged, under every starter that was promised."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.processes import Launched, Started, write_script
from tests.support.ranks import free_port, slurm_variables

SCRIPT = """
import json, os, sys
from pathlib import Path
import parallel3d, torch

async def main():
    dp, tp, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    async with parallel3d.mesh(dp=dp, tp=tp) as mesh:
        found = {"coords": list(mesh.coords)}
        for group in (mesh.world, mesh.dp, mesh.tp, mesh.pp):
            tensor = torch.tensor([10.0 ** mesh.rank])
            await group.all_reduce(tensor)
            found[group.name] = tensor.item()
        (folder / f"{mesh.rank}.json").write_text(json.dumps(found))

parallel3d.run(main)
"""
RESULTS = [
    {"coords": [0, 0, 0], "world": 1111, "dp": 101, "tp": 11, "pp": 1},
    {"coords": [0, 1, 0], "world": 1111, "dp": 1010, "tp": 11, "pp": 10},
    {"coords": [1, 0, 0], "world": 1111, "dp": 101, "tp": 1100, "pp": 100},
    {"coords": [1, 1, 0], "world": 1111, "dp": 1010, "tp": 1100, "pp": 1000},
]


@pytest.fixture
def script(tmp_path: Path) -> str:
    return write_script(tmp_path, SCRIPT)


def results(folder: Path) -> list[dict[str, object]]:
    return [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]


def test_parallel3d_launch(tmp_path, script):
    with Launched("-n", "4", script, "2", "2", str(tmp_path), preload=None) as launched:
        assert (launched.finish(), launched.stderr.text) == (0, "")
    assert results(tmp_path) == RESULTS


@pytest.mark.slow
def test_torchrun(tmp_path, script):
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4")
    folder = tmp_path / "results"
    folder.mkdir()
    with Started(*torchrun, script, "2", "2", str(folder), TMPDIR=str(tmp_path)) as started:  # it leaves logs there
        assert started.finish(seconds=60) == 0, started.stderr.text
    assert results(folder) == RESULTS


@pytest.mark.slow
@pytest.mark.exhaustive
def test_torchrun_starts_ranks_again(tmp_path):
    """Its store outlives the first attempt: what that left there must not confuse the second."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, parallel3d, torch\n"
        "async def main():\n"
        "    async with parallel3d.mesh(dp=2, startup_timeout=20) as mesh:\n"
        "        tensor = torch.ones(1)\n"
        "        await mesh.world.all_reduce(tensor)\n"
        "        print(tensor.item())\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' and os.environ['RANK'] == '1':\n"
        "    sys.exit(7)\n"
        "parallel3d.run(main)\n"
    )
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1")
    with Started(*torchrun, str(script), TMPDIR=str(tmp_path)) as started:
        assert started.finish(seconds=90) == 0, started.stderr.text
        assert started.stdout.text.count("2.0") == 2


def run_tasks(script: str, folder: Path, variables: list[dict[str, str]]) -> list[tuple[int, str]]:
    """A process for each task, as srun starts them; how each ended."""
    with ExitStack() as stack:
        tasks = [
            stack.enter_context(Started(script, "2", "2", str(folder), **environment)) for environment in variables
        ]
        return [(task.finish(), task.stderr.text) for task in tasks]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_slurm_on_one_node(tmp_path, script):
    """The tasks meet in a private file, which is gone afterwards with its folder."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    variables = slurm_variables(4, TMPDIR=str(temporary))
    assert run_tasks(script, tmp_path, variables) == [(0, "")] * 4
    assert results(tmp_path) == RESULTS
    assert list(temporary.iterdir()) == []


@pytest.mark.slow
@pytest.mark.exhaustive
def test_slurm_on_two_nodes(tmp_path, script):
    more = {
        "SLURM_STEP_NODELIST": "localhost,elsewhere",
        "MASTER_PORT": str(free_port()),
        "TMPDIR": str(tmp_path),
    }
    assert [code for code, _ in run_tasks(script, tmp_path, slurm_variables(4, 2, **more))] == [0] * 4
    assert results(tmp_path) == RESULTS


@pytest.mark.slow
def test_plain_python(tmp_path, script):
    with Started(script, "1", "1", str(tmp_path)) as alone:
        assert (alone.finish(), alone.stderr.text) == (0, "")
    assert results(tmp_path) == [{"coords": [0, 0, 0], "world": 1, "dp": 1, "tp": 1, "pp": 1}]
    with Started(script, "2", "1", str(tmp_path)) as alone:
        assert alone.finish() == 1
        assert alone.stderr.text.splitlines()[-1] == (
            "runtime.errors.LaunchError: dp(2) x tp(1) x pp(1) = 2 ranks, but 1 was started. "
            "Start 2: parallel3d launch -n 2 script.py; or choose sizes whose product is 1."
        )
