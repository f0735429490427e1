"""What trains on a mesh as one process does, by choices that real ranks meet seldom: ranks that are tasks here."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import parallel3d
from parallel3d.training import dropout
from tests.support.training import FLOAT32, check, check_dropout, check_dropout_of_parts, of_a_llama, settings, train
from tests.support.user_models import NOISE


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


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "cut"])
async def test_dropout_of_ranks_in_one_process(sequence_parallel):
    await parallel3d.in_process(partial(check_dropout, 2, sequence_parallel=sequence_parallel), ranks=2)


async def test_a_loss_that_draws_in_one_process():
    """Tensor-parallel ranks draw the same, as ranks of their own processes do."""
    NOISE.clear()
    await parallel3d.in_process(
        partial(train, settings(1, 2, 1, model__loss="tests.support.user_models:noisy_loss")), ranks=2
    )
    mine, others = NOISE.values()
    assert all(map(torch.equal, mine, others))
    assert not torch.equal(mine[0], mine[1])


async def test_dropout_of_parts_in_one_process():
    await parallel3d.in_process(partial(check_dropout_of_parts, 2), ranks=2)


async def test_ranks_that_drop_nothing_leave_the_numbers_of_their_process_alone(monkeypatch):
    """Others that are made meanwhile draw their first weights from there."""
    monkeypatch.setattr(dropout, "_seed_dropout", None)
    await on_ranks(settings(1, 2, 1, parallel__sequence_parallel=True), 2)
