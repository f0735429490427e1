"""What every transport promises, as scenarios that four ranks run: the same ones over every transport.

A scenario is a coroutine function without arguments. It makes its own mesh and asserts; nothing here knows how
the ranks were started.
"""

import asyncio
import os
import threading

import pytest
import torch

import parallel3d
from parallel3d import DeadlineExceeded, GroupClosed, InvalidCall, Mismatch, PeerLost

RANKS = 4
STRATEGIES = ("default", "ring", "tree", "hierarchical")
SCENARIOS = {}


def scenario(function):
    SCENARIOS[function.__name__] = function
    return function


def mesh_of(**sizes):
    return parallel3d.mesh(**sizes, backend=os.environ.get("CONTRACT_BACKEND", "auto"))


def flat_mesh():
    return mesh_of(dp=RANKS)


FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int32, torch.int64, torch.int8, torch.uint8)


@scenario
async def all_reduce_of_every_dtype_and_op():
    async with flat_mesh() as mesh:
        for dtype in FLOATS + INTEGERS:
            expected = {"sum": 10, "min": 1, "max": 4} | ({"mean": 2.5} if dtype in FLOATS else {})
            for op, value in expected.items():
                tensor = torch.full((3, 5), mesh.rank + 1, dtype=dtype)
                result = await mesh.world.all_reduce(tensor, op=op)
                assert result is tensor
                assert torch.equal(tensor, torch.full((3, 5), value, dtype=dtype)), (dtype, op, tensor)


@scenario
async def all_ranks_end_with_the_same_bits():
    async with flat_mesh() as mesh:
        torch.manual_seed(mesh.rank)
        tensor = torch.randn(10_001)
        await mesh.world.all_reduce(tensor)
        everyone = await mesh.world.all_gather(tensor)
        for part in everyone.chunk(RANKS):
            assert torch.equal(part, tensor)


@scenario
async def every_strategy_gives_every_rank_the_same_sum():
    async with flat_mesh() as mesh:
        for strategy in STRATEGIES:
            for numel in (1, 3, 5, 1000, 100_003):
                for dtype in (torch.float32, torch.bfloat16, torch.int64):
                    tensor = mesh.world.empty(numel, dtype=dtype) if numel % 2 else torch.empty(numel, dtype=dtype)
                    tensor.copy_(torch.arange(numel) % 50 + mesh.rank)
                    await mesh.world.all_reduce(tensor, strategy=strategy)
                    expected = (4 * (torch.arange(numel) % 50) + 6).to(dtype)
                    assert torch.equal(tensor, expected), (strategy, numel, dtype, tensor, expected)
            torch.manual_seed(mesh.rank)
            tensor = torch.randn(70_001)
            everyone = await mesh.world.all_gather(tensor)
            await mesh.world.all_reduce(tensor, op="mean", strategy=strategy)
            exact = everyone.view(RANKS, -1).double().mean(0)
            assert torch.allclose(tensor.double(), exact, atol=1e-6), strategy
            for part in (await mesh.world.all_gather(tensor)).chunk(RANKS):
                assert torch.equal(part, tensor), strategy


@scenario
async def a_result_in_common_is_what_the_await_gives():
    async with flat_mesh() as mesh:
        size = mesh.world_size
        for make in (mesh.world.empty, torch.empty):
            for shape in ((3,), (300, 128), (7, 100_000)):
                tensor = make(shape, dtype=torch.float32).fill_(mesh.rank + 1)
                for strategy in ("default", "ring"):
                    tensor.fill_(mesh.rank + 1)
                    result = await mesh.world.all_reduce(tensor, op="mean", strategy=strategy, shared=True)
                    assert result.shape == tensor.shape
                    assert bool((result == (size + 1) / 2).all())
                    await mesh.world.barrier()  # before the tensor is used again


@scenario
async def different_strategies_are_a_mismatch():
    await expect_mismatch(
        lambda mesh: mesh.world.all_reduce(torch.ones(5), strategy="ring" if mesh.rank == 2 else "tree"),
        "all_reduce(sum, ring) of float32 (5,)", "all_reduce(sum, tree) of float32 (5,)",
    )  # fmt: skip


@scenario
async def reduce_scatter_keeps_this_ranks_part():
    async with flat_mesh() as mesh:
        for dtype in FLOATS + INTEGERS:
            tensor = torch.arange(8).reshape(4, 2).to(dtype) + mesh.rank
            part = await mesh.world.reduce_scatter(tensor)
            whole = 4 * torch.arange(8).reshape(4, 2) + 6
            assert torch.equal(part, whole[mesh.rank : mesh.rank + 1].to(dtype)), (dtype, part)
        out = torch.empty(2, 3)
        mine = torch.full((8, 3), float(mesh.rank))
        assert await mesh.world.reduce_scatter(mine, "mean", out=out) is out
        assert torch.equal(out, torch.full((2, 3), 1.5))
        assert torch.equal(mine, torch.full((8, 3), float(mesh.rank)))


@scenario
async def bytes_of_any_dtype_are_moved():
    dtypes = (*FLOATS, *INTEGERS, torch.bool, torch.complex64)
    async with flat_mesh() as mesh:
        for dtype in dtypes:
            mine = torch.tensor([[mesh.rank, 1]]).to(dtype)
            gathered = await mesh.world.all_gather(mine)
            assert torch.equal(gathered, torch.tensor([[r, 1] for r in range(RANKS)]).to(dtype))
            for root in range(RANKS):
                tensor = mine.clone()
                await mesh.world.broadcast(tensor, root=root)
                assert torch.equal(tensor, torch.tensor([[root, 1]]).to(dtype))
            parts = await mesh.world.all_to_all(torch.tensor([10 * mesh.rank + i for i in range(RANKS)]).to(dtype))
            assert torch.equal(parts, torch.tensor([10 * r + mesh.rank for r in range(RANKS)]).to(dtype))


@scenario
async def sends_arrive_in_order():
    async with flat_mesh() as mesh:
        right, left = (mesh.rank + 1) % RANKS, (mesh.rank - 1) % RANKS
        sends = [mesh.world.send(torch.full((n,), mesh.rank * 100 + n), right) for n in range(1, 20)]
        for n in range(1, 20):
            tensor = torch.zeros(n, dtype=torch.int64)
            await mesh.world.recv(tensor, left)
            assert torch.equal(tensor, torch.full((n,), left * 100 + n))
        for send in sends:
            await send


@scenario
async def odd_shapes():
    async with flat_mesh() as mesh:
        scalar = torch.tensor(float(mesh.rank))
        await mesh.world.all_reduce(scalar)
        assert scalar.item() == 6
        assert (await mesh.world.all_gather(torch.tensor(mesh.rank))).tolist() == [0, 1, 2, 3]
        empty = torch.empty(0, 7)
        for work in (mesh.world.all_reduce(empty), mesh.world.all_gather(empty), mesh.world.reduce_scatter(empty),
                     mesh.world.all_to_all(empty), mesh.world.broadcast(empty)):  # fmt: skip
            assert (await work).numel() == 0
        base = torch.zeros(6, 4)
        base[:, 1] = mesh.rank
        await mesh.world.all_reduce(base[:, 1])
        assert torch.equal(base[:, 1], torch.full((6,), 6.0))
        assert base.sum() == 36
        transposed = torch.arange(8.0).reshape(2, 4).t() * mesh.rank
        await mesh.world.broadcast(transposed, root=2)
        assert torch.equal(transposed, torch.arange(8.0).reshape(2, 4).t() * 2)
        for tensor in (torch.zeros(8)[::2][:1], torch.zeros(4, 4)[1:2, ::3][:, :1]):  # one element, but a wide step
            tensor.fill_(mesh.rank)
            if mesh.rank < 2:
                await (mesh.world.send(tensor, 1) if mesh.rank == 0 else mesh.world.recv(tensor, 0))
            await mesh.world.all_reduce(tensor, "max")
            assert tensor.item() == 3
            assert (await mesh.world.all_gather(tensor + mesh.rank)).flatten().tolist() == [3, 4, 5, 6]
            await mesh.world.broadcast(tensor.zero_(), 3)
        strided = torch.zeros(8)[::2]
        if mesh.rank == 0:
            await mesh.world.send(torch.arange(8.0)[::2], 1)
        elif mesh.rank == 1:
            await mesh.world.recv(strided, 0)
            assert strided.tolist() == [0, 2, 4, 6]


@scenario
async def calls_are_in_order_whenever_they_are_awaited():
    async with flat_mesh() as mesh:
        tensors = [torch.full((64,), float(i)) for i in range(50)]
        works = [mesh.world.all_reduce(tensor) for tensor in tensors]
        for i, work in reversed(list(enumerate(works))):
            await work
            assert tensors[i][0] == i * RANKS
        assert all(work.done() for work in works)
        await asyncio.gather(*(mesh.world.all_reduce(tensor) for tensor in tensors))
        assert [int(t[0]) for t in tensors] == [i * RANKS * RANKS for i in range(50)]


@scenario
async def a_call_that_is_never_awaited_still_reaches_the_peers():
    async with flat_mesh() as mesh:
        tensor = torch.full((3,), float(mesh.rank))
        work = mesh.world.all_reduce(tensor)
        if mesh.rank != 0:
            await work
            assert tensor[0] == 6
    assert tensor[0] == 6


@scenario
async def nobody_passes_a_barrier_before_all_have_come():
    async with flat_mesh() as mesh:
        if mesh.rank == 3:
            for peer in range(3):  # each has looked at its barrier before this rank comes to it
                await mesh.dp.recv(torch.ones(1), peer)
            await mesh.world.barrier()
        else:
            early = mesh.world.barrier()
            assert not early.done()
            await mesh.dp.send(torch.ones(1), 3)
            await early


@scenario
async def groups_of_a_mesh_are_independent():
    async with mesh_of(dp=2, tp=2) as mesh:
        tensors = [torch.full((2,), float(mesh.rank)) for _ in range(4)]
        groups = (mesh.world, mesh.dp, mesh.tp, mesh.pp)
        order = list(zip(tensors, groups, strict=True))
        works = [group.all_reduce(tensor) for tensor, group in (order if mesh.rank % 2 else reversed(order))]
        await asyncio.gather(*works)
        assert [t[0].item() for t in tensors] == [float(sum(group.ranks)) for group in groups]
        assert mesh.pp.size == 1
        assert mesh.pp.transport_name == "none"


@scenario
async def a_group_of_one_costs_nothing():
    async with flat_mesh() as mesh:
        tensor = torch.arange(4.0)
        works = [mesh.tp.all_reduce(tensor, op="mean"), mesh.tp.broadcast(tensor), mesh.tp.barrier()]
        assert all(work.done() for work in works)
        for result in (await mesh.tp.all_gather(tensor), await mesh.tp.reduce_scatter(tensor),
                       await mesh.tp.all_to_all(tensor), await works[0]):  # fmt: skip
            assert torch.equal(result, torch.arange(4.0))


@scenario
async def two_meshes_live_in_one_process():
    async with flat_mesh() as first, mesh_of(dp=2, tp=2) as second:
        a, b = torch.ones(1), torch.ones(1)
        works = (first.world.all_reduce(a), second.tp.all_reduce(b))
        for work in works:
            await work
        assert (a.item(), b.item()) == (4, 2)


@scenario
async def a_deadline_names_who_has_not_come():
    async with flat_mesh() as mesh:
        await mesh.world.barrier()
        if mesh.rank == 1:
            with pytest.raises(DeadlineExceeded) as caught:  # learns from its peers that they gave up
                await mesh.world.recv(torch.ones(1), 0)
        else:
            with pytest.raises(DeadlineExceeded) as caught:
                await mesh.world.all_reduce(torch.ones(2, 2), timeout=0.6)
        text = str(caught.value)
        assert text.startswith("all_reduce(sum) of float32 (2, 2) on group world did not end within 0.6 s"), text
        assert caught.value.action == "all_reduce(sum) of float32 (2, 2)"
        assert text.endswith(
            "rank 1 (dp=1 tp=0 pp=0) has not called it; its last call there was barrier (number 1)."
        ), text
        assert (caught.value.rank, tuple(caught.value.coords)) == (1, (1, 0, 0))
        with pytest.raises(GroupClosed, match="group world is closed: all_reduce"):
            await mesh.world.barrier()
        tensor = torch.ones(1)
        await mesh.dp.all_reduce(tensor)  # other groups go on
        assert tensor == RANKS


@scenario
async def cancelling_a_call_closes_the_group_everywhere():
    async with flat_mesh() as mesh:
        if mesh.rank == 2:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(mesh.world.all_reduce(torch.ones(3)), timeout=0.2)
        elif mesh.rank != 3:  # rank 3 keeps the call from ending
            with pytest.raises(GroupClosed) as caught:
                await mesh.world.all_reduce(torch.ones(3))
            assert str(caught.value) == (
                "rank 2 (dp=2 tp=0 pp=0) cancelled all_reduce(sum) of float32 (3,) on group world"
            )
            assert caught.value.rank == 2
        else:
            with pytest.raises(GroupClosed, match=r"rank 2 .* cancelled"):
                await mesh.world.recv(torch.ones(1), 0)
        with pytest.raises(GroupClosed):
            await mesh.world.barrier()


async def expect_mismatch(call, *words):
    async with flat_mesh() as mesh:
        with pytest.raises(Mismatch) as caught:
            await call(mesh)
        for word in words:
            assert word in str(caught.value), str(caught.value)
        assert str(caught.value).startswith("call number 1 on group world: rank ")
        assert str(caught.value).count("(dp=") == 2


@scenario
async def different_shapes_are_a_mismatch():
    await expect_mismatch(
        lambda mesh: mesh.world.all_reduce(torch.ones(4 if mesh.rank == 2 else 5)),
        "all_reduce(sum) of float32 (4,)", "all_reduce(sum) of float32 (5,)", "rank 2 (dp=2 tp=0 pp=0)",
    )  # fmt: skip


@scenario
async def a_tensor_that_is_reduced_again_and_again():
    async with flat_mesh() as mesh:
        tensor, other = torch.empty(6), mesh.world.empty(6)
        for number in range(12):
            tensor.fill_(mesh.rank + number)
            other.fill_(mesh.rank * number)
            op = ("sum", "max")[number // 4 % 2]
            works = [mesh.world.all_reduce(tensor, op=op), mesh.world.all_reduce(other)]
            for work in works if number % 3 else reversed(works):
                await work
            assert tensor.tolist() == [(6 + 4 * number) if op == "sum" else 3 + number] * 6
            assert other.tolist() == [6 * number] * 6
        tensor.unsqueeze_(0)  # the same memory, but another shape from now on
        tensor.resize_(2, 3)
        assert (await mesh.world.all_reduce(tensor.fill_(1))).tolist() == [[4] * 3] * 2
        tensor.data = torch.full((2, 3), 2.0)
        assert (await mesh.world.all_reduce(tensor)).tolist() == [[8] * 3] * 2
        weight = torch.ones(2, 3, requires_grad=True)
        loss = (weight * tensor).sum()
        await mesh.world.all_reduce(tensor)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        with pytest.raises(Mismatch, match=r"float32 \(7,\)"):
            await mesh.world.all_reduce(torch.ones(7) if mesh.rank == 1 else tensor)
        with pytest.raises(GroupClosed):
            await mesh.world.all_reduce(tensor)


@scenario
async def different_dtypes_are_a_mismatch():
    await expect_mismatch(
        lambda mesh: mesh.world.all_gather(torch.ones(4, dtype=torch.float64 if mesh.rank == 0 else torch.int64)),
        "all_gather of float64 (4,)", "all_gather of int64 (4,)",
    )  # fmt: skip


@scenario
async def different_calls_are_a_mismatch():
    await expect_mismatch(
        lambda mesh: mesh.world.barrier() if mesh.rank == 1 else mesh.world.all_reduce(torch.ones(1), op="max"),
        "calls barrier", "calls all_reduce(max) of float32 (1,)",
    )  # fmt: skip


@scenario
async def different_roots_are_a_mismatch():
    await expect_mismatch(
        lambda mesh: mesh.world.broadcast(torch.ones(1), root=mesh.rank // 2),
        "broadcast(root 0) of float32 (1,)",
        "broadcast(root 1) of float32 (1,)",
    )


@scenario
async def a_receive_of_another_shape_is_a_mismatch():
    async with flat_mesh() as mesh:
        if mesh.rank == 0:

            async def send_and_hear_of_it():
                # A small send may end before its receiver comes; then the next call tells.
                await mesh.world.send(torch.ones(4), 1)
                await mesh.world.recv(torch.ones(1), 1)

            with pytest.raises((Mismatch, GroupClosed), match=r"float32 \(4,\)"):
                await send_and_hear_of_it()
        elif mesh.rank == 1:
            with pytest.raises(Mismatch) as caught:
                await mesh.world.recv(torch.ones(3), 0)
            assert "float32 (3,)" in str(caught.value)
            assert "float32 (4,)" in str(caught.value)
            assert caught.value.rank in (0, 1)


@scenario
async def a_rank_that_fails_is_named_to_those_who_wait():
    try:
        async with flat_mesh() as mesh:
            if mesh.rank == 1:
                raise ZeroDivisionError("by design")
            with pytest.raises(PeerLost) as caught:
                await mesh.world.all_reduce(torch.ones(1))
            assert str(caught.value) == "rank 1 (dp=1 tp=0 pp=0) failed with ZeroDivisionError: by design"
            assert (caught.value.rank, tuple(caught.value.coords)) == (1, (1, 0, 0))
    except ZeroDivisionError:
        assert mesh.rank == 1


@scenario
async def a_rank_that_left_is_named_to_those_who_wait():
    async with flat_mesh() as mesh:
        await mesh.world.barrier()
        if mesh.rank != 3:
            with pytest.raises(PeerLost) as caught:
                await mesh.world.all_reduce(torch.ones(1))
            assert str(caught.value) == (
                "rank 3 (dp=3 tp=0 pp=0) left the mesh; all_reduce(sum) of float32 (1,) on group world can't end."
            )


@scenario
async def leaving_early_loses_nothing():
    async with flat_mesh() as mesh:
        big = torch.full((1 << 20,), float(mesh.rank))
        if mesh.rank == 0:
            await asyncio.gather(*(mesh.world.send(big, peer) for peer in range(1, RANKS)))
        else:
            await mesh.world.recv(big, 0)
            assert torch.equal(big, torch.zeros(1 << 20))


@scenario
async def after_leaving_the_groups_are_closed():
    async with flat_mesh() as mesh:
        world = mesh.world
    with pytest.raises(GroupClosed) as caught:
        await world.barrier()
    assert str(caught.value) == "barrier: group world is closed: this rank has left the mesh"


@scenario
async def a_view_is_complete_once_its_call_is_said_to_have_ended():
    async with flat_mesh() as mesh:
        for _ in range(3):
            tensor = torch.ones(1000, 2000).t()
            work = mesh.world.all_reduce(tensor)
            while not work.done():  # noqa: ASYNC110  # whoever asks shall not see it end too early
                await asyncio.sleep(0)
            assert bool((tensor == mesh.world_size).all())
            tensor = torch.ones(1000, 2000).t()
            work = mesh.world.all_reduce(tensor)
            await asyncio.gather(*(see_the_end(work, tensor, mesh.world_size) for _ in range(3)))


async def see_the_end(work, tensor, value):
    await work
    assert bool((tensor == value).all())


@scenario
async def autograd_notices_that_a_received_tensor_was_overwritten():
    async with flat_mesh() as mesh:
        tensor, weight = torch.ones(4), torch.ones(4, requires_grad=True)
        for _ in range(5):
            if mesh.rank == 0:
                await mesh.world.send(tensor, 1)
            elif mesh.rank == 1:
                loss = (weight * tensor).sum()
                await mesh.world.recv(tensor, 0)
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    loss.backward()


@scenario
async def autograd_notices_that_a_saved_tensor_was_overwritten():
    async with flat_mesh() as mesh:
        weight = torch.ones(3, requires_grad=True)
        saved = torch.ones(3)
        loss = (weight * saved).sum()
        await mesh.world.all_reduce(saved)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@scenario
async def bad_calls_are_refused_before_anything_is_sent():
    async with flat_mesh() as mesh:
        ones, world = torch.ones(4), mesh.world
        refusals = [
            (lambda: world.all_reduce([1.0]), "all_reduce: a torch.Tensor is needed, not list."),
            (
                lambda: world.all_reduce(ones, op="product"),
                "all_reduce: op 'product' is not one of sum, mean, min, max.",
            ),
            (
                lambda: world.all_reduce(torch.ones(4, dtype=torch.int32), op="mean"),
                "all_reduce: the mean of torch.int32 is no torch.int32. Use op='sum' and divide.",
            ),
            (
                lambda: world.all_reduce(torch.ones(4, dtype=torch.bool)),
                "all_reduce: torch.bool can't be reduced; convert it to float32, float64, bfloat16, float16, int32, "
                "int64, int8 or uint8.",
            ),
            (
                lambda: world.all_reduce(ones.to_sparse()),
                "all_reduce: the tensor is torch.sparse_coo; make it dense with .to_dense() first.",
            ),
            (
                lambda: world.broadcast(torch.ones(4, device="meta")),
                f"broadcast: the tensor is on meta, but group world moves cpu tensors ({world.transport_name}). "
                "Move it with .to('cpu'), or choose another comm.backend.",
            ),
            (
                lambda: world.reduce_scatter(torch.ones(6)),
                "reduce_scatter: the first dimension of (6,) can't be cut into 4 equal parts, one for each rank of "
                "group world.",
            ),
            (
                lambda: world.all_gather(ones, out=torch.ones(8)),
                "all_gather: out is torch.float32 (8,), but the result is torch.float32 (16,).",
            ),
            (
                lambda: world.broadcast(ones, root=4),
                "broadcast: root = 4, but group world has the ranks 0 to 3.",
            ),
            (lambda: world.recv(ones, -1), "recv: src = -1, but group world has the ranks 0 to 3."),
            (lambda: world.send(ones, mesh.rank), f"send: dst = {mesh.rank} is this rank itself."),
            (
                lambda: world.all_reduce(torch.zeros(1).expand(4)),
                "all_reduce: some elements of the tensor are one in memory (expand); give a .clone() of it.",
            ),
            (lambda: world.barrier(timeout=0), "timeout = 0: give seconds, more than 0."),
            (lambda: world.barrier(timeout=float("nan")), "timeout = nan: give seconds, more than 0."),
        ]
        for call, message in refusals:
            with pytest.raises(InvalidCall) as caught:
                call()
            assert str(caught.value) == message
        await world.barrier()  # and the group is as good as before


@scenario
async def the_loop_stays_free_while_the_engine_computes():
    async with flat_mesh() as mesh:
        started, release = asyncio.Event(), threading.Event()
        loop = asyncio.get_running_loop()

        def compute(a, *, b):
            loop.call_soon_threadsafe(started.set)
            assert release.wait(30)
            return a + b

        task = asyncio.create_task(mesh.compute(compute, 1, b=2))
        await started.wait()
        release.set()
        assert await task == 3
        with pytest.raises(ZeroDivisionError):
            await mesh.compute(lambda: 1 / 0)


@scenario
async def a_cancelled_computation_leaves_the_engine_usable():
    async with flat_mesh() as mesh:
        release = threading.Event()
        running = asyncio.create_task(mesh.compute(release.wait, 30))
        waiting = asyncio.create_task(mesh.compute(lambda: 1))
        await asyncio.sleep(0)
        for task in (running, waiting):
            task.cancel()
        await asyncio.wait([running, waiting])
        release.set()
        assert await mesh.compute(lambda: 2) == 2
        with pytest.raises(RuntimeError, match="StopIteration"):
            await mesh.compute(next, iter(()))


@scenario
async def meshes_entered_at_the_same_time_are_not_mixed_up():
    meshes = [flat_mesh() for _ in range(3)]
    await asyncio.gather(*(mesh.__aenter__() for mesh in meshes))
    tensors = [torch.tensor([float(10**i)]) for i in range(3)]
    await asyncio.gather(*(mesh.world.all_reduce(t) for mesh, t in zip(meshes, tensors, strict=True)))
    assert [t.item() for t in tensors] == [4, 40, 400]
    await asyncio.gather(*(mesh.__aexit__(None, None, None) for mesh in meshes))


@scenario
async def a_call_can_be_asked_whether_it_has_ended():
    async with flat_mesh() as mesh:
        if mesh.rank == 0:
            early = mesh.world.all_reduce(torch.ones(1))
            assert not early.done()
            await asyncio.gather(*(mesh.dp.send(torch.ones(1), peer) for peer in range(1, RANKS)))
            while not early.done():  # noqa: ASYNC110
                await asyncio.sleep(0)
            await early
        else:
            await mesh.dp.recv(torch.ones(1), 0)
            await mesh.world.all_reduce(torch.ones(1))


@scenario
async def views_that_are_conjugated_or_negated():
    async with flat_mesh() as mesh:
        conjugate = torch.tensor([complex(mesh.rank, 1)]).conj()
        assert conjugate.is_conj()
        gathered = await mesh.world.all_gather(conjugate)
        assert gathered.tolist() == [complex(r, -1) for r in range(RANKS)]
        await mesh.world.broadcast(conjugate, root=3)
        assert conjugate.tolist() == [3 - 1j]


@scenario
async def running_far_ahead_is_checked_all_the_same():
    async with flat_mesh() as mesh:
        if mesh.rank == 0:
            ahead = [mesh.world.all_reduce(torch.ones(1)) for _ in range(300)]
            sends = [mesh.world.send(torch.full((2,), n), 1) for n in range(300)]
            await asyncio.gather(*(mesh.dp.send(torch.ones(1), peer) for peer in range(1, RANKS)))
            for work in ahead:
                await work
            # The last send may end before its receiver comes; then the next call tells.
            with pytest.raises(Mismatch, match=r"number 300 .* int64 \(2,\)"):
                await asyncio.gather(*sends, mesh.world.barrier())
        else:
            await mesh.dp.recv(torch.ones(1), 0)
            for _ in range(300):
                assert (await mesh.world.all_reduce(torch.ones(1))).item() == RANKS
        if mesh.rank == 1:
            tensor = torch.zeros(2, dtype=torch.int64)
            for n in range(299):
                await mesh.world.recv(tensor, 0)
                assert tensor.tolist() == [n, n]
            with pytest.raises(Mismatch, match=r"number 300 .* int64 \(3,\)"):
                await mesh.world.recv(torch.zeros(3, dtype=torch.int64), 0)
        if mesh.rank > 1:
            with pytest.raises(Mismatch, match="number 300"):
                await mesh.world.barrier()
