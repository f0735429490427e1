"""What trains on a mesh as one process does, by choices that real ranks meet seldom: ranks that are tasks here."""

from __future__ import annotations

from functools import partial

import pytest

import parallel3d
from tests.training import FLOAT32, check, of_a_llama, settings


async def on_ranks(given, ranks):
    await parallel3d.in_process(partial(check, given), ranks=ranks)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble"])
async def test_schedules_of_one_stage_a_rank(schedule):
    await on_ranks(settings(1, 1, 2, schedule), 2)


async def test_a_table_of_the_users_own(tmp_path):
    rows = "0F0,0F1,0F2,0B0,0B1,0F3,0B2,0B3\n1F0,1F1,1B0,1B1,1F2,1B2,1F3,1B3\n"
    (tmp_path / "table.csv").write_text(rows)
    await on_ranks(settings(1, 1, 2, pipeline__schedule=f"csv:{tmp_path}/table.csv"), 2)


@pytest.mark.parametrize("mesh", [(2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1)], ids=str)
async def test_float32(mesh):
    dp, tp, pp = mesh
    await on_ranks(settings(*mesh, **FLOAT32, optimizer__shard=dp > 1), dp * tp * pp)


@pytest.mark.parametrize("shard", [False, True], ids=["whole", "sharded"])
@pytest.mark.parametrize("mesh", [(2, 1, 1), (4, 1, 1), (2, 2, 2)], ids=str)
async def test_optimizer_state_whole_and_sharded(mesh, shard):
    dp, tp, pp = mesh
    await on_ranks(settings(*mesh, optimizer__shard=shard), dp * tp * pp)


@pytest.mark.parametrize("mesh", [(1, 2, 1), (1, 2, 2)], ids=str)
async def test_tied_ends_around_a_sequence_that_is_cut(mesh):
    dp, tp, pp = mesh
    given = settings(*mesh, model__args__tied=True, parallel__sequence_parallel=True)
    await on_ranks(given, dp * tp * pp)


@pytest.mark.parametrize(
    ("mesh", "options"),
    [((1, 2, 1), {"parallel__sequence_parallel": True}), ((2, 1, 2), {}), ((1, 2, 2), {"model__args__tied": True})],
    ids=str,
)
async def test_a_llama(mesh, options):
    dp, tp, pp = mesh
    await on_ranks(of_a_llama(*mesh, **options), dp * tp * pp)
