"""A rank that dies, fails or leaves while others exchange tensors with it: they know it soon, and nothing is wrong."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import time

import pytest
import torch

import parallel3d
from process_groups.tensor_exchange import Outcome, TensorExchange
from runtime.errors import CommunicationError, DeadlineExceeded, NonFiniteGradient, PeerLost
from tests.support.ranks import Ranks, Tell, torch_variables

pytestmark = pytest.mark.slow
RANKS, VICTIM, PROMISE = 4, 2, 1.0
LARGE = 1 << 20
"""Elements: enough that memory which is let go returns to the system at once."""


def add(exchange: TensorExchange, value: float, length: int = 1000) -> torch.Tensor:
    exchange.room((length,), torch.float32).fill_(value)
    exchange.post(Outcome.ALL_REDUCE)
    return exchange.result()


async def lose_a_rank(tell: Tell, backend: str) -> None:
    async with parallel3d.mesh(tp=RANKS, threads=1, backend=backend) as mesh:
        exchange = mesh.tp.tensor_exchange()

        def exchange_on() -> None:
            for number in range(10_000):
                if mesh.rank == VICTIM and number == 20:
                    tell(time.monotonic())
                    os.kill(os.getpid(), signal.SIGKILL)
                add(exchange, 1.0)

        try:
            await mesh.compute(exchange_on)
        except CommunicationError as error:
            tell((error, time.monotonic()))


@pytest.mark.parametrize("backend", ["auto", "gloo"])
def test_a_rank_is_killed(backend):
    with Ranks(lose_a_rank, torch_variables(RANKS, GLOO_SOCKET_IFNAME="lo"), (backend,)) as ranks:
        killed = ranks[VICTIM].hear()
        for number, rank in enumerate(ranks):
            if number != VICTIM:
                error, moment = rank.hear()
                assert isinstance(error, PeerLost), error
                assert error.rank == VICTIM
                assert moment - killed < PROMISE
        assert [rank.finish() for rank in ranks] == [0, 0, -signal.SIGKILL, 0]


async def fail_in_a_rank(tell: Tell) -> None:
    async with parallel3d.mesh(tp=2, threads=1) as mesh:
        exchange = mesh.tp.tensor_exchange()
        await mesh.compute(add, exchange, 1.0)
        await mesh.world.barrier()
        if mesh.rank == 0:
            mesh.tp.abort(PeerLost("rank 0 has had enough", rank=0))
            tell(time.monotonic())
            return
        try:
            await mesh.compute(add, exchange, 1.0)
        except CommunicationError as error:
            tell((str(error), error.rank, time.monotonic()))


def test_a_rank_gives_up():
    with Ranks(fail_in_a_rank, torch_variables(2)) as ranks:
        moment = ranks[0].hear()
        text, rank, noticed = ranks[1].hear()
        assert (text, rank) == ("rank 0 has had enough", 0)
        assert noticed - moment < PROMISE
        assert [rank.finish() for rank in ranks] == [0, 0]


async def come_too_late(tell: Tell) -> None:
    async with parallel3d.mesh(tp=2, threads=1, timeout=0.3) as mesh:
        exchange = mesh.tp.tensor_exchange()
        await mesh.world.barrier()
        if mesh.rank == 0:
            try:
                await mesh.compute(add, exchange, 1.0)
            except DeadlineExceeded as error:
                tell((str(error), error.rank))
            return
        await mesh.compute(time.sleep, 1.0)
        try:
            await mesh.compute(add, exchange, 1.0)
        except DeadlineExceeded as error:  # it knows that it was late
            tell(error.rank)


def test_a_rank_does_not_come():
    with Ranks(come_too_late, torch_variables(2)) as ranks:
        text, rank = ranks[0].hear()
        assert text.startswith("all_reduce of float32 (1000,) on group tp did not end within 0.3 s: rank 1 (dp=0 ")
        assert rank == 1
        assert ranks[1].hear() == 1
        assert [rank.finish() for rank in ranks] == [0, 0]


async def leave_early(tell: Tell) -> None:
    async with parallel3d.mesh(tp=2, threads=1) as mesh:
        exchange = mesh.tp.tensor_exchange()
        if mesh.rank == 0:
            exchange.room((LARGE,), torch.float32).fill_(2.0)
            exchange.post(Outcome.ALL_REDUCE)
            await mesh.compute(time.sleep, 0.5)
            tell(exchange.result().unique().tolist())
            return
        tell((await mesh.compute(add, exchange, 1.0, LARGE)).unique().tolist())
        arena = exchange._exchange.own  # as long as it lives, memory that is let go returns to the system
    del mesh, exchange
    gc.collect()
    assert arena.num_bytes_used == 0


def test_a_rank_that_leaves_lets_others_read_its_last_part():
    with Ranks(leave_early, torch_variables(2)) as ranks:
        assert [rank.hear() for rank in ranks] == [[3.0], [3.0]]
        assert [rank.finish() for rank in ranks] == [0, 0]


async def raise_what_all_raise(tell: Tell) -> None:
    with contextlib.suppress(NonFiniteGradient):
        async with parallel3d.mesh(tp=2, threads=1) as mesh:
            exchange = mesh.tp.tensor_exchange()
            exchange.room((1,), torch.float32).fill_(torch.nan)
            exchange.post(Outcome.ALL_REDUCE)
            if mesh.rank == 0:  # the other has what it needs, and would leave
                await mesh.compute(time.sleep, 0.5)
            tell(exchange.result().isnan().tolist())
            raise NonFiniteGradient("the sum is not a number", ranks=(0,))


def test_a_rank_that_raises_what_all_will_lets_them_read_why():
    with Ranks(raise_what_all_raise, torch_variables(2)) as ranks:
        assert [rank.hear() for rank in ranks] == [[True], [True]]
        assert [rank.finish() for rank in ranks] == [0, 0]
