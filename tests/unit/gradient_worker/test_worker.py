"""`parallel3d.GradientWorker`: torch models beside a server that a test plays."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy
import pytest
import torch
from torch import nn

import parallel3d
from parallel3d.gradient_worker.parts import cut_into_parts
from runtime.errors import InvalidCall
from runtime.gradient_server.wire.messages import (
    Assignment,
    AverageDone,
    Dtype,
    Kind,
    Leave,
    StateDone,
    StateWanted,
    Table,
)
from tests.support.scripted_server import Gradient, ScriptedLink, ScriptedServer


@asynccontextmanager
async def joined(**options) -> AsyncIterator[tuple[parallel3d.GradientWorker, ScriptedLink]]:
    async with (
        asyncio.timeout(30),
        ScriptedServer() as server,
        parallel3d.GradientWorker(server.address, **options) as worker,
    ):
        yield worker, await server.next_join()


async def answer(link: ScriptedLink, step: int = 0, factor: float = 2.0) -> Gradient:
    """The gradient, times a factor, as if others had been averaged in."""
    found = await link.gradient()
    link.send_parts(Kind.AVERAGE, step, 0, [each * numpy.array(factor, each.dtype) for each in found.parts])
    link.send(AverageDone(step, 0, found.done.loss, found.done.correct, 8, 0.1))
    return found


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


async def test_averages_take_the_place_of_gradients():
    net, unused = model(), nn.Parameter(torch.ones(2))
    net.unused = unused
    net[0].bias.requires_grad_(False)
    async with joined() as (worker, link):
        worker.attach(net)
        link.send(Assignment(0, 0, 0, 4, 8))
        share = await anext(worker.shares())
        loss = net(torch.randn(len(share), 3)).mean()
        loss.backward()
        before = {name: each.grad.clone() for name, each in net.named_parameters() if each.grad is not None}
        answering = asyncio.create_task(answer(link))
        average = await worker.average(loss=loss, correct=3)
        sent = await answering
        assert (average.loss, average.correct, worker.step) == (pytest.approx(loss.item()), 3, 1)
        assert [each.dtype for each in sent.table.parts] == [Dtype.FLOAT32]
        assert sum(each.size for each in sent.parts) == 12 + 5 + 2
        for name, each in before.items():
            torch.testing.assert_close(net.get_parameter(name).grad, 2 * each)
        assert unused.grad.tolist() == [0, 0], "others may have used it"
        assert net[0].bias.grad is None


async def test_tensors_of_the_callers_own():
    async with joined() as (worker, link):
        link.send(Assignment(0, 0, 0, 4, 8))
        shares = worker.shares()
        for step in range(2):
            await anext(shares)
            tensors = [torch.full((2,), 1.0 + step), torch.tensor(3.0, dtype=torch.float64), torch.empty(0)]
            tensors.append(torch.ones(2, dtype=torch.float16))
            answering = asyncio.create_task(answer(link, step))
            await worker.average(tensors, total=7)
            assert (await answering).done.total == 7
            assert [each.tolist() for each in tensors] == [[2 + 2 * step] * 2, 6, [], [2, 2]]
            link.send(Assignment(step + 1, 0, 0, 4, 8))


async def test_more_is_averaged_beside_gradients():
    net, counts = model(), torch.zeros(2, dtype=torch.float64)
    async with joined() as (worker, link):
        worker.attach(net, also=[counts])
        link.send(Assignment(0, 0, 0, 4, 8))
        await anext(worker.shares())
        net(torch.randn(4, 3)).sum().backward()
        counts.copy_(torch.tensor([5.0, 6.0]))
        answering = asyncio.create_task(answer(link))
        await worker.average()
        assert [each.dtype for each in (await answering).table.parts] == [Dtype.FLOAT32, Dtype.FLOAT64]
        assert counts.tolist() == [10, 12]


async def test_sparse_gradients_become_dense():
    net = nn.Embedding(5, 2, sparse=True)
    async with joined() as (worker, link):
        worker.attach(net)
        link.send(Assignment(0, 0, 0, 4, 8))
        await anext(worker.shares())
        net(torch.tensor([1, 1, 3])).sum().backward()
        expected = 2 * net.weight.grad.to_dense()
        answering = asyncio.create_task(answer(link))
        await worker.average()
        await answering
        assert torch.equal(net.weight.grad, expected)


@pytest.fixture
def small_parts(monkeypatch):
    """A part for every parameter."""
    monkeypatch.setattr("parallel3d.gradient_worker.worker.cut_into_parts", lambda tensors: cut_into_parts(tensors, 1))


@pytest.mark.usefixtures("small_parts")
async def test_backward_and_network_overlap():
    """The last layer's gradient has arrived while the first one's is still being computed."""
    net, reached, go_on = model(), asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def hold(_):
        loop.call_soon_threadsafe(reached.set)
        asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result(10)

    net[1].register_full_backward_hook(lambda *arguments: hold(arguments))
    async with joined() as (worker, link):
        worker.attach(net)
        link.send(Assignment(0, 0, 0, 4, 8))
        await anext(worker.shares())
        loss = net(torch.randn(4, 3)).mean()

        async def compute() -> None:
            with worker.overlap():
                await asyncio.to_thread(loss.backward)

        computing = asyncio.create_task(compute())
        await reached.wait()
        table = await link.expect(Table)
        assert len(table.parts) == 4
        early = [numpy.frombuffer(await link.expect(bytes), numpy.float32).size for _ in range(2)]
        assert (early, net[0].weight.grad) == ([1, 4], None)
        go_on.set()
        await computing
        expected = [2 * each.grad for each in net.parameters()]
        averaging = asyncio.create_task(worker.average(loss=loss))
        late = [numpy.frombuffer(await link.expect(bytes), numpy.float32) for _ in range(2)]
        assert [each.size for each in late] == [4, 12]
        sent = [each.grad.flatten().numpy() for each in reversed(list(net.parameters()))]
        link.send_parts(Kind.AVERAGE, 0, 0, [2 * each for each in sent])
        link.send(AverageDone(0, 0, 0.0, 0, 8, 0.1))
        await averaging
        for each, gradient in zip(net.parameters(), expected, strict=True):
            assert torch.equal(each.grad, gradient)


@pytest.mark.usefixtures("small_parts")
async def test_a_second_backward_comes_too_late():
    net = model()
    async with joined() as (worker, link):
        worker.attach(net)
        link.send(Assignment(0, 0, 0, 4, 8))
        await anext(worker.shares())
        with worker.overlap():
            net(torch.randn(4, 3)).mean().backward()
            with pytest.raises(InvalidCall, match="a second backward"):
                net(torch.randn(4, 3)).mean().backward()


async def test_parts_of_a_share_that_is_not_wanted_any_more_are_not_sent_for_the_next():
    net = model()
    async with joined() as (worker, link):
        worker.attach(net)
        shares = worker.shares()
        link.send(Assignment(0, 0, 0, 4, 8))
        await anext(shares)
        with worker.overlap():
            net(torch.zeros(4, 3)).mean().backward()
        await link.expect(Table)
        assert [len(await link.expect(bytes)) for _ in range(2)] == [64, 20]
        link.send(Assignment(0, 1, 0, 8, 8))
        while worker._client._protocol.share is not None:  # noqa: ASYNC110 - until it was heard
            await asyncio.sleep(0)
        await anext(shares)
        net.zero_grad()
        net(torch.ones(8, 3)).mean().backward()
        averaging = asyncio.create_task(worker.average())
        sent = await link.gradient()
        expected = torch.cat([each.grad.flatten() for each in reversed(list(net.parameters()))])
        assert torch.equal(torch.from_numpy(sent.parts[0].copy()), expected)
        averaging.cancel()


async def test_a_state_goes_from_one_model_to_another():
    mine, theirs = model(), model()
    with torch.no_grad():
        theirs[0].weight.fill_(7)
    optimizers = [torch.optim.SGD(each.parameters(), 0.1, momentum=0.9) for each in (mine, theirs)]
    async with joined() as (source, link), joined() as (sink, other):
        source.attach(theirs, optimizers[1])
        sink.attach(mine, optimizers[0])
        link.send(StateWanted(0, 1), Leave("enough"))
        assert [share async for share in source.shares()] == []
        table, parts, done = await link.state()
        assert [each.dtype for each in table.parts][:2] == [Dtype.UINT8, Dtype.FLOAT32]
        other.send_parts(Kind.STATE, 0, 1, parts)
        other.send(done, Assignment(0, 0, 0, 4, 8))
        await anext(sink.shares())
        assert all(torch.equal(mine.state_dict()[name], each) for name, each in theirs.state_dict().items())
        assert done == StateDone(0, 1)


async def test_calls_without_a_model():
    async with joined() as (worker, link):
        link.send(Assignment(0, 0, 0, 4, 8))
        await anext(worker.shares())
        with pytest.raises(InvalidCall, match="attach the model first"):
            await worker.average()
        with pytest.raises(InvalidCall, match="attach the model first"), worker.overlap():
            pass
        with pytest.raises(InvalidCall, match=r"a gradient of torch\.int64 can't be averaged"):
            await worker.average([torch.ones(2, dtype=torch.int64)])
