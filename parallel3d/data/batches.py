"""Prefetched batches: loaded ahead of the steps that use them, with the time that each was waited for."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import time
from collections import deque
from concurrent.futures import Future
from types import TracebackType
from typing import Self

from parallel3d.data.batch import Batch
from parallel3d.data.dataset import Dataset
from parallel3d.data.sampler import Sampler
from runtime.errors import DataError, InvalidCall
from runtime.log_settings import bind_step
from runtime.threads import DaemonThreads

_LONGEST_CLOSE = 1.0  # seconds that closing waits for a running read, which cannot be interrupted


class Batches:
    """The batches of steps first..stop-1 in order; while one is used, `prefetch` more are loaded.

        async with Batches(dataset, sampler, stop=100) as batches:
            async for batch in batches:
                ...   # batches.step is its step, batches.last_waited the seconds it was waited for

    Cancelling a wait loses nothing: the next one gives the same batch. An error in the dataset ends the iteration.
    Without `async with`, the loading thread ends with the last batch, with `aclose`, or when this object is deleted.
    """

    _is_closed = True  # for __del__, if __init__ raises

    def __init__(
        self,
        dataset: Dataset,
        sampler: Sampler,
        *,
        first: int = 0,
        stop: int,
        prefetch: int = 2,
        timeout: float | None = None,
    ) -> None:
        if prefetch < 0:
            raise InvalidCall(f"prefetch = {prefetch}: give 0 or more; 0 loads each batch when it is asked for.")
        self._dataset, self._sampler, self._timeout = dataset, sampler, timeout
        self._next, self._stop, self._prefetch = first, stop, prefetch
        self._loading: deque[Future[Batch]] = deque()
        self._thread: DaemonThreads | None = None
        self._is_closed = self._is_waiting = False
        self.waited = 0.0
        """Seconds waited for all batches so far."""
        self.last_waited = 0.0
        """Seconds waited for the last batch."""

    @property
    def num_ready(self) -> int:
        """Prefetched batches that are loaded."""
        return sum(loading.done() for loading in self._loading)

    @property
    def step(self) -> int:
        """The step of the last batch."""
        return self._next - 1

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Batch:
        if self._is_waiting:
            raise InvalidCall("Another task waits for a batch already: ask for one at a time.")
        if self._is_closed or self._next >= self._stop:
            await self.aclose()
            raise StopAsyncIteration
        self._load_ahead(max(1, self._prefetch))
        await self._wait_for(self._loading[0])
        try:
            batch = self._loading.popleft().result()
        except BaseException:
            await self.aclose()
            raise
        self._next += 1
        self._load_ahead(self._prefetch)  # so that they load while this one is used
        return batch

    def _load_ahead(self, num_steps: int) -> None:
        if self._thread is None:
            self._thread = DaemonThreads("parallel3d-data", limit=1)
        while len(self._loading) < num_steps and (step := self._next + len(self._loading)) < self._stop:
            run = contextvars.copy_context().run  # a dataset's log lines are the rank's
            self._loading.append(self._thread.submit(run, _load, self._dataset, self._sampler, step))

    async def _wait_for(self, loading: Future[Batch]) -> None:
        self._is_waiting, start = True, time.perf_counter()
        try:
            async with asyncio.timeout(self._timeout):
                await _end_of(loading)
        except TimeoutError:
            samples = ", ".join(map(str, self._sampler.indices(self._next)))
            await self.aclose()
            raise DataError(
                f"The batch of step {self._next} was not there after {self._timeout:g} s: samples {samples}."
            ) from None
        finally:
            self._is_waiting, self.last_waited = False, time.perf_counter() - start
            self.waited += self.last_waited

    async def aclose(self) -> None:
        """Stop loading, and wait a moment for a running read."""
        for loading in self._end():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LONGEST_CLOSE):
                    await _end_of(loading)

    def _end(self) -> list[Future[Batch]]:
        """Stop without waiting; returns the loads that are running."""
        running = [loading for loading in self._loading if not loading.cancel()]
        self._loading.clear()
        if self._thread is not None and not self._is_closed:
            self._thread.stop()
        self._is_closed = True
        return running

    async def __aenter__(self) -> Self:
        self._load_ahead(self._prefetch)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if not self._is_closed:
            self._end()


def _load(dataset: Dataset, sampler: Sampler, step: int) -> Batch:
    """Not a method: a queued load must not keep the Batches alive."""
    bind_step(step)
    return dataset.batch(sampler.indices(step))


async def _end_of(future: Future[Batch]) -> None:
    """Wait until it is done, with or without an error. Cancelling the wait does not cancel the future."""
    if future.done():
        return
    loop, done = asyncio.get_running_loop(), asyncio.Event()

    def wake(_: Future[Batch]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop may be closed by then
            loop.call_soon_threadsafe(done.set)

    future.add_done_callback(wake)
    await done.wait()


class QueueDepths:
    """How many batches were ready each time one was asked for: 0 means that steps wait for data."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        """The most batches that are prefetched."""
        self._sum = self._num = 0

    def note(self, depth: int) -> None:
        """Note the depth when a batch is asked for."""
        self._sum += depth
        self._num += 1

    def take(self) -> float | None:
        """The mean since the last call; None if no batch was asked for."""
        mean = self._sum / self._num if self._num else None
        self._sum = self._num = 0
        return mean
