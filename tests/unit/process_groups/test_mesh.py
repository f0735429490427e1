"""`parallel3d.mesh` and `in_process`: what is given, what is refused, what comes back."""

from __future__ import annotations

import asyncio
import contextvars
import threading

import pytest
import torch

import parallel3d
from parallel3d import ConfigError, GroupClosed, InvalidCall, LaunchError, NonFiniteGradient
from process_groups.torch_backend.store_notes import StoreNotes
from runtime.threads import DaemonThreads


async def places(ranks: int, *args, **settings):
    async def main():
        async with parallel3d.mesh(*args, **settings) as mesh:
            assert mesh.world_size == mesh.world.size == ranks
            assert len(mesh.hosts) == ranks
            return tuple(mesh.coords), mesh.dp.ranks, mesh.tp.ranks, mesh.pp.ranks

    return await parallel3d.in_process(main, ranks)


async def test_results_come_in_order_of_rank():
    assert await places(4, dp=2, tp=2) == [
        ((0, 0, 0), (0, 2), (0, 1), (0,)),
        ((0, 1, 0), (1, 3), (0, 1), (1,)),
        ((1, 0, 0), (0, 2), (2, 3), (2,)),
        ((1, 1, 0), (1, 3), (2, 3), (3,)),
    ]


async def test_the_designs_example():
    coords = [place[0] for place in await places(8, dp=2, tp=2, pp=2, order="dp-tp-pp")]
    assert (coords[3], coords[5], coords[7]) == ((0, 1, 1), (1, 0, 1), (1, 1, 1))


async def test_an_order_given_as_a_table():
    found = await places(2, dp=2, order=[[1, 0, 0], [0, 0, 0]])
    assert found == [((1, 0, 0), (1, 0), (0,), (0,)), ((0, 0, 0), (1, 0), (1,), (1,))]


YAML = """
parallel: {dp: 2}
comm: {timeout: 7}
train: {batch_size: 2}
"""


async def test_a_mesh_from_a_yaml_file(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(YAML)
    found = await places(2, file)
    assert [place[0] for place in found] == [(0, 0, 0), (1, 0, 0)]
    found = await places(4, str(file), overrides={"parallel.tp": 2})
    assert [place[0] for place in found] == [(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0)]

    async def main():
        async with parallel3d.mesh(file, overrides={"comm.backend": "gloo"}) as mesh:
            return mesh.config.comm.timeout, mesh.config.comm.backend, mesh.world.timeout

    assert await parallel3d.in_process(main, 2) == [(7.0, "gloo", 7.0)] * 2


async def test_a_mesh_from_a_checked_configuration():
    assert len(await places(1, parallel3d.RunConfig())) == 1


@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        (
            {"dp": 3},
            LaunchError,
            "dp(3) x tp(1) x pp(1) = 3 ranks, but 2 were started. "
            "Start 3: parallel3d launch -n 3 script.py; or choose sizes whose product is 2.",
        ),
        (
            {"dp": 2, "order": [[1, 0, 0], [1, 0, 0]]},
            InvalidCall,
            "order: the table has 2 rows for 2 ranks; each coordinate of dp(2) x tp(1) x pp(1) must stand "
            "there exactly once; look at (dp=0 tp=0 pp=0).",
        ),
        ({"dp": 2, "backend": "mpi"}, InvalidCall, "backend = 'mpi': give one of auto, gloo, nccl."),
        ({"dp": 2, "timeout": -1}, InvalidCall, "timeout = -1: give seconds, more than 0."),
        ({"dp": 2, "timeout": float("nan")}, InvalidCall, "timeout = nan: give seconds, more than 0."),
        ({"dp": 2, "startup_timeout": True}, InvalidCall, "startup_timeout = True: give seconds, more than 0."),
        (
            {"dp": 2, "overrides": {"parallel.tp": 3}},
            InvalidCall,
            "mesh: overrides change a YAML file, and none is given.",
        ),
        (
            {"config": "run.yaml", "dp": 2},
            InvalidCall,
            "mesh: give sizes or a YAML file, not both; change the file's values with overrides.",
        ),
        (
            {"config": parallel3d.RunConfig(), "overrides": {"parallel.dp": 2}},
            InvalidCall,
            "mesh: a RunConfig is complete; load its file with overrides instead.",
        ),
    ],
)
async def test_a_refusal(settings, kind, message):
    with pytest.raises(kind) as caught:
        await places(2, **settings)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("text", "overrides", "words"),
    [
        ("parallel: {dp: 0}", {}, "run.yaml:1:16  parallel.dp = 0: must be at least 1."),
        ("comm: {timeout: -1}", {}, "comm.timeout = -1: must be more than 0 and at most 1e9 seconds."),
        ("parallel: {dp: 2}", {"parallel.xx": 3}, "parallel.xx: unknown key."),
        (None, {}, "run.yaml  file not found."),
    ],
)
async def test_a_configuration_that_is_refused(tmp_path, text, overrides, words):
    file = tmp_path / "run.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        await places(2, file, overrides=overrides)
    assert words in str(caught.value)


def test_a_plain_process_is_a_mesh_of_one(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "PARALLEL3D_STORE_FD", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(LaunchError, match=r"= 2 ranks, but 1 was started\. Start 2: parallel3d launch -n 2"):
        parallel3d.mesh(tp=2)


async def test_a_mesh_is_entered_once():
    async def main():
        mesh = parallel3d.mesh()
        async with mesh:
            with pytest.raises(InvalidCall) as caught:
                await mesh.__aenter__()
        assert str(caught.value) == "this mesh was entered before; make a new one with parallel3d.mesh(...)."
        with pytest.raises(InvalidCall):
            async with mesh:
                pass
        async with parallel3d.mesh():
            pass

    await parallel3d.in_process(main, 1)


async def test_the_first_error_is_raised_and_the_others_are_cancelled():
    cancelled = []

    async def main():
        mesh = parallel3d.mesh(dp=3)
        async with mesh:
            if mesh.rank == 1:
                raise LookupError("first")
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(mesh.rank)
                raise ValueError("second") from None

    with pytest.raises(LookupError, match="first"):
        await parallel3d.in_process(main, 3)
    assert sorted(cancelled) == [0, 2]


async def test_a_cancelled_run_cancels_every_rank():
    inside, left = asyncio.Semaphore(0), []

    async def main():
        async with parallel3d.mesh(dp=2) as mesh:
            try:
                inside.release()
                await mesh.world.barrier() if mesh.rank == 0 else await asyncio.Event().wait()
            finally:
                left.append(mesh.rank)

    running = asyncio.create_task(parallel3d.in_process(main, 2))
    await inside.acquire()
    await inside.acquire()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert sorted(left) == [0, 1]


async def test_the_engine_computes_in_the_callers_context_on_one_thread():
    variable = contextvars.ContextVar("variable")

    async def main():
        async with parallel3d.mesh(dp=2) as mesh:
            variable.set(mesh.rank)
            threads = {await mesh.compute(threading.get_ident) for _ in range(3)}
            assert len(threads) == 1
            assert threading.get_ident() not in threads
            return await mesh.compute(lambda a, *, b: (variable.get(), a, b), 1, b=2)

    assert await parallel3d.in_process(main, 2) == [(0, 1, 2), (1, 1, 2)]


async def test_an_unknown_strategy_is_refused_by_name():
    async def main():
        async with parallel3d.mesh() as mesh:
            with pytest.raises(InvalidCall) as caught:
                mesh.world.all_reduce(torch.ones(1), strategy="rign")
            return str(caught.value)

    (message,) = await parallel3d.in_process(main, 1)
    assert message.startswith("all_reduce: strategy 'rign' is not one of default")


async def test_empty_gives_new_tensors_of_any_shape():
    async def main():
        async with parallel3d.mesh() as mesh:
            one, two = mesh.world.empty(2, 3, dtype=torch.int8), mesh.dp.empty((4,))
            assert (tuple(one.shape), one.dtype) == ((2, 3), torch.int8)
            assert (tuple(two.shape), two.dtype, two.device.type) == ((4,), torch.float32, "cpu")

    await parallel3d.in_process(main, 1)


async def test_a_group_says_what_it_is():
    async def main():
        async with parallel3d.mesh(dp=2) as mesh:
            return repr(mesh.dp), repr(mesh.tp)

    found = await parallel3d.in_process(main, 2)
    assert found[1] == ("<Group dp: rank 1 of 2, in-process>", "<Group tp: rank 0 of 1, none>")


async def test_a_work_can_be_awaited_often_and_by_many():
    async def main():
        async with parallel3d.mesh(dp=2) as mesh:
            tensor = torch.ones(2)
            work = mesh.world.all_reduce(tensor)

            async def wait():
                return await work

            results = await asyncio.gather(wait(), wait(), wait())
            assert all(result is tensor for result in results)
            assert work.done()
            assert (await work) is tensor

    await parallel3d.in_process(main, 2)


async def test_a_failed_work_fails_each_time_it_is_awaited():
    async def main():
        async with parallel3d.mesh(dp=2) as mesh:
            if mesh.rank == 1:
                return
            work = mesh.world.recv(torch.ones(1), 1, timeout=0.05)
            later = mesh.world.barrier()
            for _ in range(2):
                with pytest.raises(parallel3d.CommunicationError):
                    await work
            with pytest.raises(GroupClosed, match="group world was closed: "):
                await later

    await parallel3d.in_process(main, 2)


class LostStore:
    """A store whose host is gone."""

    def __getattr__(self, name):
        def lost(*_):
            raise RuntimeError("Connection reset by peer")

        return lost


async def test_nobody_waits_at_the_end_for_a_store_that_is_gone():
    threads = DaemonThreads("test-notes")
    notes = StoreNotes(LostStore(), "world", [], 0, threads)
    notes._members = [None, None]
    async with asyncio.timeout(10):
        await notes.wait_for_peers(deadline=float("inf"))
    threads.stop()


async def test_what_beginners_write_gets_a_hint():
    async def main():
        mesh = parallel3d.mesh()
        with pytest.raises(AttributeError) as early:
            _ = mesh.rank
        assert str(early.value) == (
            "the mesh has no 'rank' before it is entered: async with parallel3d.mesh(...) as mesh"
        )
        async with mesh:
            assert repr(mesh) == "<Mesh dp=1 tp=1 pp=1: rank 0 (dp=0 tp=0 pp=0)>"
            with pytest.raises(AttributeError, match=r"the mesh has no 'ranks'$"):
                _ = mesh.ranks
            with pytest.raises(InvalidCall) as caught:
                await mesh.compute(main)
            assert str(caught.value) == "compute: main is async; await it on the event loop instead."
            work = mesh.world.barrier()
            assert repr(work) == "<Work: barrier on group world, ended>"

    await parallel3d.in_process(main, 1)


async def test_an_error_of_an_in_process_rank_says_whose_it_is():
    async def main():
        async with parallel3d.mesh(dp=2) as mesh:
            if mesh.rank == 1:
                raise ZeroDivisionError
            await mesh.world.barrier()

    with pytest.raises(ZeroDivisionError) as caught:
        await parallel3d.in_process(main, 2)
    assert caught.value.__notes__ == ["raised in rank 1 of parallel3d.in_process"]


async def test_what_a_mesh_is_left_with_is_raised_whatever_is_still_under_way():
    async def leave():
        async with parallel3d.mesh(dp=2) as mesh:
            left = mesh.world.recv(torch.empty(1), 0) if mesh.rank else None
            raise NonFiniteGradient(f"not a number, {left} or not", ranks=(0,))

    async def main():
        with pytest.raises(NonFiniteGradient, match="not a number"):
            await leave()
        return "raised"

    assert await parallel3d.in_process(main, 2) == ["raised"] * 2
