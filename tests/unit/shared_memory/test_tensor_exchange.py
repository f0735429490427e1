"""Exchanges of tensors through shared memory between threads of one process, and through calls."""

from __future__ import annotations

import asyncio
import gc
import time

import pytest
import torch

import parallel3d
from process_groups.shared_memory.layout import NUM_ROOMS
from process_groups.shared_memory.tensor_exchange import SharedTensorExchange
from process_groups.tensor_exchange import Outcome, slice_of
from runtime.errors import CommunicationError, DeadlineExceeded, GroupClosed, InvalidCall, Mismatch, PeerLost
from tests.support.tensor_ranks import ThreadRanks, check_exchanges, in_threads


@pytest.mark.parametrize("size", [2, 3, 4])
def test_shared_memory(size):
    in_threads(size, check_exchanges)


async def test_ranks_of_one_process():
    async def main() -> None:
        async with parallel3d.mesh(tp=3) as mesh:
            exchange = mesh.tp.tensor_exchange()
            assert exchange is mesh.tp.tensor_exchange()
            await mesh.compute(check_exchanges, exchange)

    await parallel3d.in_process(main, ranks=3)


def add(exchange: SharedTensorExchange, value: float, shape: tuple[int, ...] = (2, 3)) -> torch.Tensor:
    exchange.room(shape, torch.float32).fill_(value)
    exchange.post(Outcome.ALL_REDUCE)
    return exchange.result()


def test_something_else_can_be_done_before_the_result_is_taken():
    def work(exchange):
        if exchange.rank == 0:
            time.sleep(0.02)
        exchange.room((4,), torch.float32).fill_(1.0)
        exchange.post(Outcome.ALL_REDUCE)
        meanwhile = torch.ones(3).sum()
        return exchange.result().sum() + meanwhile, exchange.waited

    (_, waited), (total, waited_longer) = in_threads(2, work)
    assert total == 11.0
    assert waited_longer > 0.01 > waited >= 0.0


def test_memory_grows_with_the_largest_part_and_no_further():
    with ThreadRanks(2) as ranks:
        before = ranks.arenas[0].num_bytes_used

        def work(exchange):
            for length in (10, 50_000, 100_000, 20, 100_000, 70_000, *range(1000, 1100)):
                for _ in range(3):
                    assert add(exchange, 1.0, (length,)).sum() == 2 * length

        ranks.run(work)
        gc.collect()
        assert ranks.arenas[0].num_bytes_used - before <= NUM_ROOMS * 4 * 102_400


def test_what_is_written_next_changes_nothing_that_was_read():
    """A rank that is far behind still reads what was posted for it."""

    def work(exchange):
        results = []
        for number in range(50):
            if number % 2 == exchange.rank:
                time.sleep(0.0005)
            results.append(add(exchange, float(number), (1000 * (number % 3 + 1),)))
        return [result.unique().tolist() for result in results]

    assert in_threads(2, work) == [[[2.0 * number] for number in range(50)]] * 2


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_modes_of_autograd_leave_nothing_behind(mode):
    def work(exchange):
        with mode():
            add(exchange, 1.0)
        result = add(exchange, 1.0)
        assert not result.is_inference()
        return result.requires_grad_().mul(2).sum().backward()

    in_threads(2, work)


@pytest.mark.parametrize(
    "other",
    [((3, 2), torch.float32, Outcome.ALL_REDUCE), ((2, 3), torch.float64, Outcome.ALL_REDUCE),
     ((2, 3), torch.float32, Outcome.ALL_GATHER)],
)  # fmt: skip
def test_ranks_that_exchange_different_things(other):
    def work(exchange):
        shape, dtype, outcome = other if exchange.rank else ((2, 3), torch.float32, Outcome.ALL_REDUCE)
        exchange.room(shape, dtype)
        exchange.post(outcome)
        with pytest.raises(Mismatch) as caught:
            exchange.result()
        return str(caught.value), caught.value.rank, caught.value.coords.tp

    (text, *place), _ = in_threads(2, work)
    assert text == (
        "exchange number 1 on group tp: rank 0 (dp=0 tp=0 pp=0) calls all_reduce of float32 (2, 3), but rank 1 "
        "(dp=0 tp=1 pp=0) calls something else."
    )
    assert place == [1, 1]


def test_a_deadline_names_the_rank_that_did_not_come():
    with ThreadRanks(3, timeout=0.05) as ranks:
        ranks.exchanges[2].room((2,), torch.float32)
        ranks.exchanges[2].post(Outcome.ALL_REDUCE)
        with pytest.raises(DeadlineExceeded) as caught:
            ranks.run(lambda exchange: add(exchange, 1.0, (2,)), ranks=[0])
        assert str(caught.value) == (
            "all_reduce of float32 (2,) on group tp did not end within 0.05 s: rank 1 (dp=0 tp=1 pp=0) has not "
            "come to it; of 1 exchanges it has posted 0."
        )
        assert caught.value.rank == 1


def test_a_peer_that_is_gone():
    with ThreadRanks(2) as ranks:
        ranks.trouble = PeerLost("rank 1 died", rank=1)
        with pytest.raises(PeerLost) as caught:
            ranks.run(lambda exchange: add(exchange, 1.0), ranks=[0])
        assert caught.value is ranks.trouble
        assert ranks.given_up == [ranks.trouble], "the group is closed for all"


@pytest.mark.parametrize("who", [0, 1])
def test_a_group_that_is_given_up(who):
    with ThreadRanks(2) as ranks:
        ranks.shared[who].give_up()
        with pytest.raises(GroupClosed):
            ranks.run(lambda exchange: add(exchange, 1.0), ranks=[0])


def test_what_a_rank_that_gave_up_has_posted_is_not_used():
    with ThreadRanks(2) as ranks:
        for exchange in ranks.exchanges:
            exchange.room((2,), torch.float32)
            exchange.post(Outcome.ALL_REDUCE)
        ranks.shared[1].give_up()
        with pytest.raises(GroupClosed):
            ranks.exchanges[0].result()


def test_slices_have_to_be_equal():
    assert slice_of((4, 6), 1, 2, 3) == (4, 2)
    with pytest.raises(InvalidCall, match=r"^\(4, 7\) can't be cut into 3 equal slices along dimension 1\.$"):
        slice_of((4, 7), 1, 0, 3)


def test_no_memory(monkeypatch):
    with ThreadRanks(2) as ranks:
        monkeypatch.setattr(ranks.arenas[0], "empty", lambda *_: None)
        with pytest.raises(CommunicationError, match=r"^no memory for a part to exchange of 4\.0 MiB: "):
            ranks.exchanges[0].room((1 << 20,), torch.float32)


async def test_a_peer_that_leaves_a_mesh_of_one_process():
    async def main() -> str:
        async with parallel3d.mesh(tp=2) as mesh:
            exchange = mesh.tp.tensor_exchange()
            if mesh.rank == 1:
                return "left"
            try:
                await mesh.compute(add, exchange, 1.0)
            except PeerLost as lost:
                return f"{lost.rank} lost"
        return ""

    assert await parallel3d.in_process(main, ranks=2) == ["1 lost", "left"]


async def test_a_group_that_is_closed_in_one_process():
    async def main() -> None:
        async with parallel3d.mesh(tp=2) as mesh:
            exchange = mesh.tp.tensor_exchange()
            await mesh.compute(add, exchange, 1.0)
            await mesh.world.barrier()
            mesh.tp.abort(GroupClosed("enough"))
            with pytest.raises(GroupClosed, match="enough"):
                await mesh.compute(add, exchange, 1.0)

    await parallel3d.in_process(main, ranks=2)


async def test_a_loop_that_does_not_carry_it_out(monkeypatch):
    """The deadline of a call holds even if the event loop stands still."""
    monkeypatch.setattr("process_groups.tensor_exchange._GRACE", 0.0)

    async def main() -> None:
        async with parallel3d.mesh(tp=2, timeout=0.05) as mesh:
            exchange = mesh.tp.tensor_exchange()
            if mesh.rank == 0:
                computing = asyncio.ensure_future(mesh.compute(add, exchange, 1.0))
                await asyncio.sleep(0)
                time.sleep(0.2)  # noqa: ASYNC251
                with pytest.raises(DeadlineExceeded):
                    await computing

    with pytest.raises(CommunicationError):  # the group is closed
        await parallel3d.in_process(main, ranks=2)
