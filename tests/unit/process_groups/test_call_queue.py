"""A queue carries calls out in order: on the spot, in its thread where nobody waits, and whatever goes wrong."""

from __future__ import annotations

import asyncio
import gc
import itertools
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from process_groups import call_queue
from process_groups.arena import Arena
from process_groups.call import Call
from process_groups.call_queue import CallQueue, Steps, is_short
from process_groups.counters import Abandoned, Counter, Patience, Sleepers
from runtime.errors import CommunicationError, GroupClosed, PeerLost
from tests.support.processes import SECONDS

_numbers = itertools.count()


class Queues:
    """A queue, a counter that its calls wait for, and what they did."""

    def __init__(self) -> None:
        self.arena = Arena(4096, 2)
        self._sleeping = self.arena.memory[128:136].cast("Q")
        self.counter = Counter(self.arena, 64, Sleepers(self._sleeping, [self._sleeping]))
        self.is_given_up = False
        self.thread = f"test-queue-{next(_numbers)}"
        self.queue = CallQueue(self.thread, Patience(0, 0), lambda: self.is_given_up, self._explain)
        self.log: list[str] = []
        self.threads: set[str] = set()

    def _explain(self, call: Call) -> CommunicationError:
        return GroupClosed(f"{call.kind} was aborted")

    def steps(self, name: str, *targets: int) -> Steps:
        """A call that waits for the counter to reach each target."""
        for target in targets:
            self._note(f"{name} waits for {target}")
            yield self.counter, target
        self._note(f"{name} ends")

    def _note(self, text: str) -> None:
        self.log.append(text)
        self.threads.add(threading.current_thread().name)

    def add(self, name: str, *targets: int, is_short: bool = True, num_bytes: int = 0):
        values = torch.empty(num_bytes, dtype=torch.uint8, device="meta")
        return self.queue.add(Call(name, target=values), self.steps(name, *targets), is_short)


@pytest.fixture
def queues() -> Iterator[Queues]:
    made = Queues()
    yield made
    made.is_given_up = True  # whatever its thread still waits for
    made.queue.stop()
    for thread in [thread for thread in threading.enumerate() if thread.name == made.thread]:
        thread.join(SECONDS)
    made.arena.close()


async def ended(task) -> None:
    """As a call is awaited that did not end on the spot."""
    loop, waiter = asyncio.get_running_loop(), asyncio.Event()
    task.add_done_callback(lambda _: loop.call_soon_threadsafe(waiter.set))
    async with asyncio.timeout(SECONDS):
        await waiter.wait()


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(SECONDS):
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(0)


async def test_a_short_call_ends_on_the_spot(queues):
    began = time.monotonic()
    task = queues.add("a")
    assert task.has_ended()
    assert task.ended_well(0.0)
    assert task.exception() is None
    assert began <= task.ended_at <= time.monotonic()
    assert queues.threads == {threading.current_thread().name}


async def test_a_long_call_never_runs_on_the_loop(queues):
    task = queues.add("a", is_short=False)
    await ended(task)
    assert queues.threads == {queues.thread}


async def test_calls_keep_their_order(queues):
    tasks = [queues.add("a", 1), queues.add("b"), queues.add("c", 2), queues.add("d")]
    assert queues.log == ["a waits for 1"]
    assert not any(task.has_ended() for task in tasks)
    queues.counter.store(1)
    assert not tasks[3].ended_well(0.0)
    assert queues.log == ["a waits for 1", "a ends", "b ends", "c waits for 2"]
    queues.counter.store(2)
    assert tasks[3].ended_well(0.0), "whoever waits for the last carries out all before it"
    assert all(task.ended_well(0.0) for task in tasks)
    assert queues.threads == {threading.current_thread().name}


async def test_long_and_short_calls_keep_their_order(queues):
    tasks = [queues.add(name, 1, is_short=name in "bd") for name in "abcde"]
    queues.counter.store(1)
    for task in reversed(tasks):
        await ended(task)
    assert [line for line in queues.log if line.endswith("ends")] == [f"{name} ends" for name in "abcde"]


async def test_waiting_a_moment_on_the_spot(queues):
    task = queues.add("a", 1)
    end = time.monotonic() + 0.005
    assert not task.ended_well(0.005)
    assert time.monotonic() >= end
    queues.counter.store(1)
    assert task.ended_well(0.005)
    assert queues.threads == {threading.current_thread().name}


async def test_the_thread_takes_over_what_nobody_awaits(queues):
    tasks = [queues.add("a", 1), queues.add("b", 2)]
    await asyncio.sleep(0)  # the loop has turned to other things
    queues.counter.store(2)
    await until(tasks[1].has_ended)
    assert queues.threads == {threading.current_thread().name, queues.thread}
    assert queues.log[0] == "a waits for 1", "begun by the loop, ended by the thread"


async def test_what_is_awaited_at_once_needs_no_thread(queues):
    for number in range(1, 6):
        task = queues.add("a", number)
        queues.counter.store(number)
        assert task.ended_well(0.001)
        await asyncio.sleep(0)
    assert queues.thread not in {thread.name for thread in threading.enumerate()}


async def calls_thread(
    queues: Queues, monkeypatch, num_bytes: int = call_queue._MIDDLE_BYTES, at_once: bool = True
) -> bool:
    """Whether a long call is handed to the thread before it is awaited."""
    called: list[None] = []
    with monkeypatch.context() as patch:
        patch.setattr(queues.queue, "call_thread", lambda: called.append(None))
        task = queues.add("a", is_short=False, num_bytes=num_bytes)
    if called:
        queues.queue.call_thread()
    monkeypatch.setattr(call_queue, "_HABIT", replace(call_queue._HABIT, at_once_seconds=math.inf if at_once else 0.0))
    if not task.ended_well(SECONDS):
        await ended(task)
    await until(lambda: not queues.queue._thread_is_called)
    return bool(called)


FIRST = call_queue._HABIT.num_calls + 1  # calls that are handed to the thread: there is no call before the first


@pytest.fixture
def without_pauses(monkeypatch) -> None:
    """However slow the machine is, calls are not far apart."""
    monkeypatch.setattr(call_queue, "_HABIT", replace(call_queue._HABIT, look_seconds=10 * SECONDS))


@pytest.mark.usefixtures("without_pauses")
async def test_long_calls_that_are_always_awaited_at_once_need_no_thread(queues, monkeypatch):
    is_called = [await calls_thread(queues, monkeypatch) for _ in range(FIRST + 5)]
    assert is_called == [True] * FIRST + [False] * 5
    queues.threads.clear()
    await calls_thread(queues, monkeypatch)
    assert queues.threads == {threading.current_thread().name}
    await until(queues.add("a", is_short=False).has_ended)
    assert queues.threads == {threading.current_thread().name, queues.thread}, "nobody awaited it"


@pytest.mark.usefixtures("without_pauses")
async def test_one_long_call_that_is_awaited_late_means_that_the_next_may_be_too(queues, monkeypatch):
    at_once = [True] * FIRST + [False] + [True] * (call_queue._HABIT.num_calls + 1)
    is_called = [await calls_thread(queues, monkeypatch, at_once=each) for each in at_once]
    assert is_called == [True] * FIRST + [False] + [True] * call_queue._HABIT.num_calls + [False]


@pytest.mark.usefixtures("without_pauses")
async def test_the_thread_is_called_for_the_longest_calls_however_they_are_awaited(queues, monkeypatch):
    for _ in range(FIRST):
        await calls_thread(queues, monkeypatch)
    is_called = [await calls_thread(queues, monkeypatch, call_queue._MIDDLE_BYTES + more) for more in (0, 1)]
    assert is_called == [False, True]


@pytest.mark.usefixtures("without_pauses")
async def test_what_comes_behind_a_call_that_nobody_has_awaited_is_for_the_thread(queues, monkeypatch):
    for _ in range(FIRST):
        await calls_thread(queues, monkeypatch)
    called: list[None] = []
    monkeypatch.setattr(queues.queue, "call_thread", lambda: called.append(None))
    first = queues.add("a", is_short=False)
    assert not called
    queues.add("b", is_short=False)
    assert called
    assert first.ended_well(SECONDS)


@pytest.mark.usefixtures("without_pauses")
async def test_the_thread_looks_once(queues, monkeypatch):
    submitted, submit = [], queues.queue._thread.submit
    monkeypatch.setattr(queues.queue._thread, "submit", lambda work: submitted.append(work) or submit(work))
    for _ in range(FIRST + 5):
        await calls_thread(queues, monkeypatch)
    assert submitted.count(queues.queue._look) == 1
    queues.queue._is_looked_after = False
    queues.queue.stop()
    await calls_thread(queues, monkeypatch)
    assert submitted.count(queues.queue._look) == 1, "a queue that is stopped has no thread"


@pytest.mark.usefixtures("without_pauses")
async def test_a_call_that_is_awaited_often_counts_once(queues, monkeypatch):
    monkeypatch.setattr(call_queue, "_HABIT", replace(call_queue._HABIT, at_once_seconds=math.inf))
    await calls_thread(queues, monkeypatch)
    task = queues.add("a", is_short=False)
    await ended(task)
    for _ in range(2 * FIRST):
        assert task.ended_well(SECONDS)
    assert await calls_thread(queues, monkeypatch)


@pytest.mark.usefixtures("without_pauses")
@pytest.mark.parametrize("flag", ["_thread_is_called", "_is_stopped"])
def test_the_thread_does_not_look_when_it_is_called_or_stopped(queues, flag):
    queues.queue._thread_is_wanted.set()  # as whoever sets the flag does; that may be before the look begins
    setattr(queues.queue, flag, True)
    queues.queue._look()


def test_what_is_left_is_carried_out_after_the_thread_has_stopped_looking(queues, monkeypatch):
    """So that whoever adds a call meanwhile finds that nobody looks after it, or it is carried out too."""
    monkeypatch.setattr(call_queue, "_HABIT", replace(call_queue._HABIT, look_seconds=0.0))
    queues.queue._is_looked_after = True
    found = []

    def steps() -> Steps:
        found.append(queues.queue._is_looked_after)
        yield from ()

    with monkeypatch.context() as patch:
        patch.setattr(queues.queue, "call_thread", lambda: None)
        queues.queue.add(Call("a"), steps(), is_short=False)
    queues.queue._look()
    assert found == [False]


def test_a_call_that_is_made_off_the_loop_does_not_spoil_those_on_it(queues):
    with pytest.raises(RuntimeError, match="no running event loop"):
        queues.add("a", 1)

    async def add_one() -> None:
        task = queues.add("b", 1)
        queues.counter.store(1)
        await until(task.has_ended)

    asyncio.run(add_one())


async def test_calls_that_are_far_apart_make_no_habit(queues, monkeypatch):
    monkeypatch.setattr(call_queue, "_HABIT", replace(call_queue._HABIT, look_seconds=0.0))
    assert all([await calls_thread(queues, monkeypatch) for _ in range(3 * FIRST)])


@pytest.mark.usefixtures("without_pauses")
async def test_looking_whether_a_call_has_ended_is_no_await(queues, monkeypatch):
    monkeypatch.setattr(call_queue, "_HABIT", replace(call_queue._HABIT, at_once_seconds=math.inf))
    for _ in range(FIRST):
        task = queues.add("a", is_short=False)
        task.ended_well(0.0)
        await until(task.has_ended)
    assert await calls_thread(queues, monkeypatch)


async def have_the_habit(queues: Queues, monkeypatch) -> None:
    """And a thread that looks every 10 ms from now on."""
    habit = call_queue._HABIT
    monkeypatch.setattr(call_queue, "_HABIT", replace(habit, look_seconds=10 * SECONDS))
    for _ in range(FIRST):
        await calls_thread(queues, monkeypatch)
    await until(lambda: queues.queue._is_looked_after)
    monkeypatch.setattr(call_queue, "_HABIT", replace(habit, at_once_seconds=math.inf))
    queues.queue._thread_is_wanted.set()  # the pause under way is a long one
    await until(lambda: not queues.queue._is_looked_after)
    queues.queue.note_await(queues.queue._latest_added, time.monotonic())


async def test_a_call_that_is_not_awaited_is_under_way_soon_though_the_loop_is_held_up(queues, monkeypatch):
    await have_the_habit(queues, monkeypatch)
    task = queues.add("a", is_short=False)
    queues.threads.clear()
    end = time.monotonic() + SECONDS
    while not task.has_ended():
        assert time.monotonic() < end
        time.sleep(0.001)  # noqa: ASYNC251
    assert queues.threads <= {queues.thread}


async def test_the_thread_stops_looking_when_no_calls_come(queues, monkeypatch):
    await have_the_habit(queues, monkeypatch)
    await until(lambda: not queues.queue._is_looked_after)
    assert await calls_thread(queues, monkeypatch)


@pytest.mark.usefixtures("without_pauses")
async def test_a_lane_that_is_stopped_while_its_thread_looks_leaves_none(queues, monkeypatch):
    for _ in range(FIRST):
        await calls_thread(queues, monkeypatch)
    queues.queue.stop()
    await until(lambda: queues.thread not in {thread.name for thread in threading.enumerate()})


async def test_while_the_thread_is_at_it_the_loop_is_not(queues):
    task = queues.add("a", 1, is_short=False)
    await until(lambda: "a waits for 1" in queues.log)
    assert not task.ended_well(math.inf), "it returns at once"
    queues.counter.store(1)
    await ended(task)


async def test_calls_that_come_while_the_thread_ends_are_not_forgotten(queues):
    for number in range(1, 300):
        task = queues.add("a", number, is_short=number % 2 == 0)
        queues.counter.store(number)
        await ended(task)


def failing(error: Exception) -> Steps:
    raise error
    yield  # a generator


@pytest.mark.parametrize(
    ("fails", "kind", "text"),
    [
        (lambda: PeerLost("gone"), PeerLost, "gone"),
        (lambda: ZeroDivisionError("by design"), CommunicationError, "ZeroDivisionError: by design"),
        (lambda: RuntimeError("a tensor operation"), CommunicationError, "RuntimeError: a tensor operation"),
        (Abandoned, GroupClosed, "broken was aborted"),
    ],
    ids=["lost", "by zero", "tensor", "given up"],
)
@pytest.mark.parametrize("short", [True, False])
async def test_an_exception_ends_the_call_and_only_that(queues, fails, kind, text, short):
    task = queues.queue.add(Call("broken"), failing(fails()), short)
    after = queues.add("after")
    await ended(after)
    assert task.has_ended()
    assert not task.ended_well(0.0)
    found = task.exception()
    assert (type(found), str(found)) == (kind, text)
    assert task.ended_at is not None
    assert after.ended_well(0.0)


async def test_an_abandoned_call_ends_wherever_it_waits(queues):
    on_the_spot, queued = queues.add("a", 1), queues.add("b", 1)
    queues.is_given_up = True
    assert not on_the_spot.ended_well(1.0)
    await ended(queued)
    assert [str(task.exception()) for task in (on_the_spot, queued)] == ["a was aborted", "b was aborted"]


async def test_the_thread_hears_that_the_group_was_given_up(queues):
    task = queues.add("a", 1, is_short=False)
    await until(lambda: "a waits for 1" in queues.log)
    queues.is_given_up = True
    await ended(task)
    assert str(task.exception()) == "a was aborted"


async def test_a_call_that_failed_is_kept(queues):
    """Peers may still write into its buffers."""
    fine, broken = Call("fine", torch.ones(1)), Call("broken", torch.ones(1))
    tensors = [weakref.ref(call.source) for call in (fine, broken)]
    queues.queue.add(fine, iter(()), True)
    queues.queue.add(broken, failing(PeerLost("gone")), True)
    del fine, broken
    gc.collect()
    assert [tensor() is None for tensor in tensors] == [True, False]


async def test_a_lane_is_idle_when_a_call_would_be_the_next(queues):
    assert queues.queue.is_idle
    queues.add("a")
    assert queues.queue.is_idle, "it has ended"
    task = queues.add("b", 1)
    assert not queues.queue.is_idle, "one waits"
    queues.counter.store(1)
    assert task.ended_well(0.0)
    assert queues.queue.is_idle
    seen = []
    queues.queue.add(Call("c"), (seen.append(queues.queue.is_idle) for _ in (1,)), False)
    await until(lambda: queues.queue.is_idle)
    assert seen == [False], "the thread is at one"


async def test_callbacks_come_once(queues):
    heard = []
    task = queues.add("a", 1)
    task.add_done_callback(heard.append)
    assert heard == []
    queues.counter.store(1)
    await ended(task)
    task.add_done_callback(heard.append)
    assert heard == [task, task]


async def test_an_ended_call_holds_no_tensors(queues):
    def use(tensor: torch.Tensor) -> Steps:
        yield queues.counter, 1
        tensor.add_(1)

    tensor = torch.ones(3)
    gone = weakref.ref(tensor)
    task = queues.queue.add(Call("a"), use(tensor), True)
    del tensor
    queues.counter.store(1)
    assert task.ended_well(0.0)
    gc.collect()
    assert gone() is None


async def test_a_lane_that_is_stopped_before_its_thread_began_leaves_none(queues):
    task = queues.add("a", 1)
    queues.is_given_up = True
    queues.queue.stop()
    await until(lambda: task.ended)
    await asyncio.sleep(0)  # the loop's turn to call the thread has come and gone
    await until(lambda: queues.thread not in {thread.name for thread in threading.enumerate()})
    assert isinstance(task.exception(), GroupClosed)


async def test_a_stopped_lane_ends_its_thread_after_what_it_has(queues):
    task = queues.add("a", 1, is_short=False)
    queues.queue.stop()
    (thread,) = [thread for thread in threading.enumerate() if thread.name == queues.thread]
    assert thread.is_alive()
    queues.counter.store(1)
    thread.join(SECONDS)
    assert not thread.is_alive()
    assert task.ended_well(0.0)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (Call("barrier"), True),
        (Call("send", source=torch.empty(1 << 18)), True),
        (Call("send", source=torch.empty((1 << 18) + 1)), False),
        (Call("all_gather", source=torch.empty(1), target=torch.empty(1 << 19)), False),
    ],
)
def test_what_the_loop_may_do_itself(call, expected):
    assert is_short(call) is expected
