"""Batches loaded ahead of the steps that use them, and how long each was waited for."""

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

# A read that is under way cannot be interrupted; longer than this nobody waits for its end.
_LONGEST_CLOSE = 1.0


class Batches:
    """The batches of steps first..stop-1, one after the other; while one is used, `prefetch` more are loaded.

        async with Batches(dataset, sampler, stop=100) as batches:
            async for batch in batches:
                ...   # batches.step is its number, batches.last_waited what it was waited for

    Cancelling a wait loses nothing: the next one gives the same batch. An error in the dataset ends the iteration.
    Without `async with`, the thread ends with the last batch, `aclose`, or when nobody holds this any more.
    """

    _is_closed = True  # until it is made

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
            raise InvalidCall(f"prefetch = {prefetch}; the least is 0, which loads each batch when it is asked for.")
        self._dataset, self._sampler, self._timeout = dataset, sampler, timeout
        self._next, self._stop, self._prefetch = first, stop, prefetch
        self._loading: deque[Future[Batch]] = deque()
        self._thread: DaemonThreads | None = None
        self._is_closed = self._is_waiting = False
        self.waited = 0.0
        """Seconds, over all batches so far."""
        self.last_waited = 0.0
        """Seconds, for the batch that came last."""

    @property
    def num_ready(self) -> int:
        """Batches that are loaded, and wait to be asked for."""
        return sum(loading.done() for loading in self._loading)

    @property
    def step(self) -> int:
        """The step of the batch that came last."""
        return self._next - 1

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Batch:
        if self._is_waiting:
            raise InvalidCall("Another task waits for a batch already; batches are asked for one after the other.")
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
        """Load no more, and wait a moment for a read that is under way."""
        for loading in self._end():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LONGEST_CLOSE):
                    await _end_of(loading)

    def _end(self) -> list[Future[Batch]]:
        """Stop without waiting; gives what cannot be stopped."""
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
    """A function, not a method: a load that waits its turn must not keep the batches alive."""
    bind_step(step)
    return dataset.batch(sampler.indices(step))


async def _end_of(future: Future[Batch]) -> None:
    """Wait until it is done, however it ended. Unlike awaiting it, cancelling this leaves it alone."""
    if future.done():
        return
    loop, done = asyncio.get_running_loop(), asyncio.Event()

    def tell(_: Future[Batch]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop may be gone by then
            loop.call_soon_threadsafe(done.set)

    future.add_done_callback(tell)
    await done.wait()
