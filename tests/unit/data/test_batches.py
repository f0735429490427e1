"""Batches are loaded ahead in one thread, counted, and leave nothing behind however the loop ends."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from parallel3d.data import Batch, Batches, Sampler
from runtime.errors import DataError, InvalidCall

THREAD = "parallel3d-data"
LIMIT = 10.0


class Numbers:
    """Sample i is (i, -i). A gate that is closed holds every load; `loads` are the batches asked for."""

    def __init__(self) -> None:
        self.loads: list[list[int]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.reached = threading.Semaphore(0)
        self.threads: set[str] = set()
        self.error_at: int | None = None

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return index, -index

    def batch(self, indices: Sequence[int]) -> Batch:
        self.loads.append(list(indices))
        self.threads.add(threading.current_thread().name)
        self.reached.release()
        assert self.gate.wait(LIMIT)
        if self.error_at in indices:
            raise DataError(f"sample {self.error_at} is rotten") from OSError("disk")
        return Batch(torch.tensor(indices), -torch.tensor(indices))


def batches(numbers: Numbers, stop: int = 5, **options: Any) -> Batches:
    return Batches(numbers, Sampler(1000, 2, shuffle=False), stop=stop, **options)


def data_threads() -> int:
    return sum(thread.name == THREAD for thread in threading.enumerate())


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before = data_threads()
    yield
    gc.collect()
    deadline = time.monotonic() + LIMIT
    while data_threads() > before:
        assert time.monotonic() < deadline, "a thread is left"
        threading.Event().wait(0.001)


async def reached(numbers: Numbers) -> None:
    """Until one more load has begun."""
    assert await asyncio.to_thread(numbers.reached.acquire, timeout=LIMIT)


async def test_steps_come_in_order():
    seen = []
    async with batches(Numbers()) as given:
        async for inputs, targets in given:
            assert isinstance(inputs, torch.Tensor)
            seen.append((given.step, inputs.tolist(), targets.tolist()))
    assert seen == [(k, [2 * k, 2 * k + 1], [-2 * k, -2 * k - 1]) for k in range(5)]


async def test_any_step_can_be_the_first():
    assert [batch.inputs.tolist() async for batch in batches(Numbers(), first=3)] == [[6, 7], [8, 9]]
    assert [batch async for batch in batches(Numbers(), first=5)] == []


@pytest.mark.parametrize("prefetch", [0, 1, 2, 9])
async def test_as_many_steps_as_asked_are_loaded_ahead_and_no_more(prefetch):
    numbers = Numbers()
    given = batches(numbers, prefetch=prefetch)
    await anext(given)
    for _ in range(1 + min(prefetch, 4)):
        await reached(numbers)
    assert not numbers.reached.acquire(blocking=False)
    assert len(numbers.loads) == 1 + min(prefetch, 4)
    await given.aclose()


async def test_loading_begins_before_the_first_batch_is_asked_for():
    numbers = Numbers()
    async with batches(numbers):
        await reached(numbers)
        await reached(numbers)
        assert numbers.loads == [[0, 1], [2, 3]]


async def test_one_thread_loads_them_all():
    numbers = Numbers()
    assert len([batch async for batch in batches(numbers)]) == 5
    assert numbers.threads == {THREAD}


async def test_waiting_is_counted():
    numbers = Numbers()
    numbers.gate.clear()
    async with batches(numbers, prefetch=1) as given:
        asyncio.get_running_loop().call_later(0.05, numbers.gate.set)
        await anext(given)
        assert given.waited == given.last_waited >= 0.04
        await reached(numbers)
        await reached(numbers)
        await asyncio.to_thread(given._loading[0].result, LIMIT)
        first = given.waited
        await anext(given)  # it is there
        assert given.last_waited < 0.04
        assert given.waited == first + given.last_waited


async def test_an_error_in_the_dataset_comes_at_its_step_with_its_cause():
    numbers = Numbers()
    numbers.error_at = 5
    given = batches(numbers)
    assert [(await anext(given)).inputs.tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    with pytest.raises(DataError, match="sample 5 is rotten") as error:
        await anext(given)
    assert isinstance(error.value.__cause__, OSError)
    with pytest.raises(StopAsyncIteration):
        await anext(given)


@pytest.mark.parametrize("error", [MemoryError, StopIteration])
async def test_errors_of_other_kinds_end_it_too_and_never_quietly(error):
    class Bad(Numbers):
        def batch(self, indices: Sequence[int]) -> Batch:
            raise error

    with pytest.raises((RuntimeError, MemoryError)):
        assert [batch async for batch in batches(Bad())]


async def test_a_cancelled_wait_loses_no_batch():
    numbers = Numbers()
    numbers.gate.clear()
    async with batches(numbers) as given:
        wait = asyncio.ensure_future(anext(given))
        await reached(numbers)
        wait.cancel()
        with pytest.raises(asyncio.CancelledError):
            await wait
        numbers.gate.set()
        assert [batch.inputs.tolist() async for batch in given] == [[2 * k, 2 * k + 1] for k in range(5)]


async def test_leaving_early_cancels_what_waits_its_turn():
    numbers = Numbers()
    async with batches(numbers, prefetch=4) as given:
        async for _ in given:
            numbers.gate.clear()
            break
        while len(numbers.loads) < 2:
            await reached(numbers)
        asyncio.get_running_loop().call_later(0.02, numbers.gate.set)
    loads = len(numbers.loads)
    with pytest.raises(StopAsyncIteration):
        await anext(given)
    assert len(numbers.loads) == loads <= 5


async def test_cancelling_the_loop_closes_it():
    numbers = Numbers()
    numbers.gate.clear()

    async def use() -> None:
        async with batches(numbers) as given:
            async for _ in given:
                pass

    task = asyncio.ensure_future(use())
    await reached(numbers)
    task.cancel()
    await asyncio.sleep(0)
    numbers.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert numbers.loads == [[0, 1]]


async def test_a_loop_left_without_closing_ends_its_thread_when_nobody_holds_it():
    numbers = Numbers()
    given = batches(numbers)
    await anext(given)
    kept = weakref.ref(given)
    del given
    gc.collect()
    assert kept() is None  # and the fixture sees the thread end


async def test_closing_waits_only_a_moment_for_a_read_that_hangs(monkeypatch):
    monkeypatch.setattr("parallel3d.data.batches._LONGEST_CLOSE", 0.01)
    numbers = Numbers()
    numbers.gate.clear()
    given = batches(numbers)
    async with given:
        await reached(numbers)
    await given.aclose()  # twice is no harm
    numbers.gate.set()


async def test_a_read_that_hangs_is_named(monkeypatch):
    monkeypatch.setattr("parallel3d.data.batches._LONGEST_CLOSE", 0.01)
    numbers = Numbers()
    async with batches(numbers, timeout=0.02, prefetch=0) as given:
        await anext(given)
        numbers.gate.clear()
        with pytest.raises(DataError, match=r"The batch of step 1 was not there after 0\.02 s: samples 2, 3\."):
            await anext(given)
        numbers.gate.set()


async def test_two_tasks_cannot_ask_at_once():
    numbers = Numbers()
    numbers.gate.clear()
    async with batches(numbers) as given:
        first = asyncio.ensure_future(anext(given))
        await reached(numbers)
        with pytest.raises(InvalidCall, match="Another task waits"):
            await anext(given)
        numbers.gate.set()
        assert (await first).inputs.tolist() == [0, 1]


def test_a_loop_that_is_gone_while_a_load_is_under_way():
    numbers = Numbers()
    numbers.gate.clear()

    async def leave() -> None:
        given = batches(numbers)
        wait = asyncio.ensure_future(anext(given))
        await reached(numbers)
        wait.cancel()

    asyncio.run(leave())
    numbers.gate.set()


def test_prefetch_below_zero():
    with pytest.raises(InvalidCall, match="prefetch = -1: give 0 or more"):
        batches(Numbers(), prefetch=-1)
