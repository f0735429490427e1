"""Ends and stops ranks of a mesh while the others wait: nobody hangs, and all learn who it was."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time

import pytest
import torch

import parallel3d
from parallel3d import CommunicationError, DeadlineExceeded, LaunchError, PeerLost
from process_groups import rendezvous as meeting
from tests.support.processes import abandoned_memory
from tests.support.ranks import Rank, Ranks, Tell, slurm_variables, torch_variables

RANKS = 4
PROMISE = 1.0  # seconds within which a death is known
VICTIMS = (0, 2)  # rank 0 serves the store
CALLS = ("all_reduce", "barrier", "recv", "send")


@pytest.fixture(autouse=True)
def nothing_stays_in_shared_memory():
    before = abandoned_memory()
    yield
    assert abandoned_memory() <= before


def place(rank: int) -> str:
    return f"rank {rank} (dp={rank // 2} tp={rank % 2} pp=0)"


def call(group: parallel3d.Group, kind: str, victim: int, **options: float):
    """A call that can't end without the victim."""
    match kind:
        case "all_reduce":
            return group.all_reduce(torch.ones(1 << 20), **options)
        case "barrier":
            return group.barrier(**options)
        case "recv":
            return group.recv(torch.ones(3), victim, **options)
        case "send":  # more than the sockets' buffers hold
            return group.send(torch.ones(1 << 24), victim, **options)
    raise AssertionError(kind)


async def wait_for_victim(tell: Tell, kind: str, victim: int, limit: float) -> None:
    async with parallel3d.mesh(dp=2, tp=2) as mesh:
        await mesh.world.barrier()
        if mesh.rank == victim:
            tell("ready")
            await asyncio.Event().wait()
        work = call(mesh.world, kind, victim, timeout=limit)
        tell("ready")
        try:
            await work
        except CommunicationError as error:
            tell((error, time.monotonic()))


def survivors(ranks: Ranks, victim: int):
    return [rank for number, rank in enumerate(ranks) if number != victim]


@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize("kind", CALLS)
def test_a_rank_is_killed_while_the_others_wait_for_it(kind, victim):
    with Ranks(wait_for_victim, torch_variables(RANKS), (kind, victim, 30.0)) as ranks:
        assert [rank.hear() for rank in ranks] == ["ready"] * RANKS
        killed = ranks[victim].send(signal.SIGKILL)
        for rank in survivors(ranks, victim):
            error, moment = rank.hear()
            assert type(error) is PeerLost
            assert str(error).startswith(f"{place(victim)} died; {kind}"), error
            assert str(error).endswith(" on group world can't end.")
            assert (error.rank, tuple(error.coords)) == (victim, (victim // 2, victim % 2, 0))
            assert error.action.startswith(kind)
            assert moment - killed < PROMISE
        assert [rank.finish() for rank in survivors(ranks, victim)] == [0] * (RANKS - 1)
        assert ranks[victim].finish() == -signal.SIGKILL


@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize("kind", ["all_reduce", "recv"])
def test_a_stopped_rank_is_named_at_the_deadline(kind, victim):
    with Ranks(wait_for_victim, torch_variables(RANKS), (kind, victim, 0.7)) as ranks:
        assert ranks[victim].hear() == "ready"
        ranks[victim].send(signal.SIGSTOP)
        for rank in survivors(ranks, victim):
            assert rank.hear() == "ready"
            error, _ = rank.hear()
            assert type(error) is DeadlineExceeded
            terms = {"all_reduce": "all_reduce(sum) of float32 (1048576,)", "recv": "recv of float32 (3,)"}[kind]
            what = {
                "all_reduce": "has not called it; its last call there was barrier (number 1)",
                "recv": "has not sent it; so far it has sent 0 here",
            }[kind]
            assert str(error) == f"{terms} on group world did not end within 0.7 s: {place(victim)} {what}."
            assert (error.rank, tuple(error.coords)) == (victim, (victim // 2, victim % 2, 0))
        assert [rank.finish() for rank in survivors(ranks, victim)] == [0] * (RANKS - 1)


async def leave_without_a_word(tell: Tell, victim: int) -> None:
    async with parallel3d.mesh(dp=2, tp=2) as mesh:
        await mesh.world.barrier()
        if mesh.rank == victim:
            os._exit(0)
        try:
            await mesh.world.all_reduce(torch.ones(3))
        except CommunicationError as error:
            tell(error.to_wire())


def test_a_rank_that_exits_inside_the_mesh_is_as_good_as_dead():
    with Ranks(leave_without_a_word, torch_variables(RANKS), (1,)) as ranks:
        for rank in survivors(ranks, 1):
            assert rank.hear() == {
                "kind": "PeerLost",
                "message": f"{place(1)} died; all_reduce(sum) of float32 (3,) on group world can't end.",
                "rank": 1,
                "coords": [0, 1, 0],
                "step": None,
                "action": "all_reduce(sum) of float32 (3,)",
            }
        assert [rank.finish() for rank in ranks] == [0] * RANKS


async def fail_by_design(tell: Tell, victim: int) -> None:
    async with parallel3d.mesh(dp=2, tp=2) as mesh:
        await mesh.world.barrier()
        tell("ready")
        await (asyncio.Event().wait() if mesh.rank == victim else mesh.tp.barrier())


def test_sigterm_is_told_to_those_who_wait():
    """A rank that ends in order says goodbye: only the one who waits for it fails."""
    with Ranks(fail_by_design, torch_variables(RANKS), (3,)) as ranks:
        assert [rank.hear() for rank in ranks] == ["ready"] * RANKS
        ranks[3].send(signal.SIGTERM)
        with pytest.raises(PeerLost) as caught:
            ranks[2].hear()
        assert str(caught.value) == f"{place(3)} was cancelled"
        assert [rank.finish() for rank in ranks] == [0, 0, 1, 128 + signal.SIGTERM]


async def wait_apart(tell: Tell) -> None:
    async with parallel3d.mesh(dp=4) as mesh:
        await mesh.world.barrier()
        tell("ready")
        await (asyncio.Event().wait() if mesh.rank == 2 else mesh.world.all_reduce(torch.ones(1 << 20)))


def test_a_rank_on_another_host_is_killed():
    """Only its connections tell of that, and they don't know whose they were; but nobody hangs."""
    variables = [
        {**each, "PARALLEL3D_HOST": f"host-{rank}"}
        for rank, each in enumerate(torch_variables(RANKS, GLOO_SOCKET_IFNAME="lo"))
    ]
    with Ranks(wait_apart, variables) as ranks:
        assert [rank.hear() for rank in ranks] == ["ready"] * RANKS
        ranks[2].send(signal.SIGKILL)
        for rank in survivors(ranks, 2):
            with pytest.raises(PeerLost):
                rank.hear(seconds=5.0)
        assert [rank.finish() for rank in survivors(ranks, 2)] == [1] * (RANKS - 1)


async def meet(tell: Tell, startup_timeout: float) -> None:
    async with parallel3d.mesh(dp=2, tp=2, startup_timeout=startup_timeout) as mesh:
        tell(mesh.rank)


def message_of(rank: Rank, kind: type[Exception]) -> str:
    with pytest.raises(kind) as caught:
        rank.hear()
    assert rank.finish() == 1
    return str(caught.value)


@pytest.mark.parametrize(
    ("present", "missing"),
    [((0, 1, 2), "rank 3"), ((1, 2), "ranks 0, 3"), ((0,), "ranks 1, 2, 3")],
)
def test_ranks_that_never_come_are_listed(tmp_path, present, missing):
    variables = slurm_variables(RANKS, TMPDIR=str(tmp_path))
    with Ranks(meet, [variables[rank] for rank in present], (0.5,)) as ranks:
        for rank in ranks:
            assert message_of(rank, DeadlineExceeded) == (
                f"start-up: {missing} of 4 did not come within 0.5 s. "
                "Look at their output, or raise comm.startup_timeout."
            )


def test_a_store_that_never_comes_is_named():
    variables = torch_variables(RANKS)
    with Ranks(meet, variables[1:2], (0.5,)) as ranks:
        assert message_of(ranks[0], DeadlineExceeded) == (
            f"start-up: the store at 127.0.0.1:{variables[0]['MASTER_PORT']} could not be reached "
            "within 0.5 s. Rank 0 serves it: look at its output, or raise comm.startup_timeout."
        )


def test_a_store_whose_port_is_taken_is_refused():
    variables = torch_variables(RANKS)
    taken = ("127.0.0.1", int(variables[0]["MASTER_PORT"]))
    with socket.create_server(taken), Ranks(meet, variables[:1], (5.0,)) as ranks:
        message = message_of(ranks[0], LaunchError)
    assert message.startswith(f"start-up: rank 0 can't serve the store at 127.0.0.1:{variables[0]['MASTER_PORT']}: ")
    assert message.endswith(" Choose another MASTER_PORT.")


async def die_while_groups_form(tell: Tell, victim: int, backend: str, startup_timeout: float) -> None:
    if os.environ["SLURM_PROCID"] == str(victim):
        meeting.open_backend = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
        meeting.Exchange = meeting.SharedMemoryTransport = meeting.open_backend
    async with parallel3d.mesh(dp=2, startup_timeout=startup_timeout, backend=backend):
        raise AssertionError("formed without a member")


@pytest.mark.parametrize(
    ("backend", "startup_timeout", "name"),
    [("auto", 30.0, "rank 1"), ("gloo", 2.0, "rank 1 (dp=1 tp=0 pp=0)")],  # gloo itself waits until its time is up
)
def test_a_rank_that_dies_while_groups_form_is_named(tmp_path, backend, startup_timeout, name):
    variables = slurm_variables(2, TMPDIR=str(tmp_path))
    with Ranks(die_while_groups_form, variables, (1, backend, startup_timeout)) as ranks:
        assert ranks[1].finish() == -signal.SIGKILL
        assert message_of(ranks[0], PeerLost) == f"start-up: {name} ended before the mesh was formed."
