"""A gradient server and its workers as real processes, each of which may die at an exact point; and their history.

Everybody tells what happens as it does: the server each step and its shares, a worker what it has applied or loaded.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Self

import numpy

from runtime.gradient_server.client.protocol import ShareChanged
from runtime.gradient_server.client.worker import GradientClient
from runtime.gradient_server.server import GradientServer, StepRecord
from runtime.gradient_server.settings import GradientServerSettings
from tests.support.gradient_problem import CLOSE, USUAL, Size, Weights, alone, raw, sample_loss
from tests.support.processes import SECONDS
from tests.support.ranks import Rank, Tell, free_port
from tests.support.wire_faults import Injector, Point

TOKEN = b"a token for tests, and nothing else"


# What processes tell.


class Joined(NamedTuple):
    """worker: the server's number for it."""

    worker: int


class Taken(NamedTuple):
    """A share that a worker is about to compute."""

    step: int
    start: int
    end: int


class Received(NamedTuple):
    """An average, which is applied next."""

    step: int


class Applied(NamedTuple):
    """A step's average, with the weights that it gave."""

    step: int
    loss: float
    probe: list[float]


class Loaded(NamedTuple):
    """Another's weights, to go on with this step."""

    step: int
    probe: list[float]


class Ended(NamedTuple):
    """In order."""

    step: int
    weights: list[Any]


class Listening(NamedTuple):
    """The server does."""


class Stepped(NamedTuple):
    """The server has the average of this step."""

    step: int
    attempt: int
    shares: dict[int, tuple[int, int]]
    loss: float


class Figures(NamedTuple):
    """What the server counts, when it was asked."""

    rejected: dict[str, int]
    """By reason."""
    connections: dict[str, int]
    workers: int
    bytes_waiting: int


Word = Joined | Taken | Received | Applied | Loaded | Ended | Listening | Stepped | Figures


@dataclass(frozen=True)
class Manner:
    """How a worker behaves."""

    point: Point | None = None
    """Where it dies."""
    holds: tuple[tuple[str, int], ...] = ()
    """Places and steps at which it waits for the test's word, once each: `compute` a share, `received` an average."""
    blocks: bool = False
    """Its event loop waits then, too."""
    give_up_seconds: float = SECONDS


PLAIN = Manner()


# What the processes do.


async def serve(tell: Tell, settings: GradientServerSettings, point: Point | None, ear: Connection) -> None:
    injector = Injector(point, tell)
    injector.arm()

    def on_step(record: StepRecord) -> None:
        shares = {worker: (share.start, share.end) for worker, share in record.shares.items()}
        injector.tell(Stepped(record.step, record.attempt, shares, record.loss))
        injector.at("step", record.step)

    def on_word() -> None:
        if ear.recv() == "go on":
            server.stop("the test has seen enough")
        else:
            found = server.figures()
            tell(Figures(dict(found.totals.rejected), dict(found.connections), found.workers, found.bytes_waiting))

    async with GradientServer(settings, on_step=on_step) as server:
        tell(Listening())
        asyncio.get_running_loop().add_reader(ear.fileno(), on_word)
        await server.finished()
        asyncio.get_running_loop().remove_reader(ear.fileno())


async def work(tell: Tell, address: str, name: str, size: Size, manner: Manner, ear: Connection) -> None:
    injector = Injector(manner.point, tell)
    injector.arm()
    weights, holds = _Told(name, size, injector), _Holds(manner, ear)
    async with GradientClient(
        address, token=TOKEN, node_id=name, keeper=weights, give_up_seconds=manner.give_up_seconds
    ) as client:
        assert client.worker_id is not None
        injector.tell(Joined(client.worker_id))
        async for share in client.shares():
            injector.tell(Taken(share.step, share.start, share.end))
            injector.at("compute", share.step)
            await holds.at("compute", share.step)
            gradient = weights.gradient(share.step, share.start, share.end)
            loss = sample_loss(share.step, share.start, share.end)
            try:
                average = await client.average(raw(gradient), raw(weights.averages), loss=loss)
            except ShareChanged:
                continue
            injector.tell(Received(share.step))
            injector.at("received", share.step)
            await holds.at("received", share.step)
            weights.apply(weights.averages)
            injector.tell(Applied(average.step, average.loss, weights.probe()))
        injector.tell(Ended(client.step, weights.values))


class _Told(Weights):
    def __init__(self, name: str, size: Size, injector: Injector) -> None:
        super().__init__(name, size)
        self._injector = injector

    def load(self, step: int, parts: Sequence[Any]) -> None:
        super().load(step, parts)
        self._injector.tell(Loaded(step, self.probe()))


class _Holds:
    def __init__(self, manner: Manner, ear: Connection) -> None:
        self._left, self._blocks, self._ear = set(manner.holds), manner.blocks, ear

    async def at(self, place: str, step: int) -> None:
        if (place, step) in self._left:
            self._left.remove((place, step))
            if self._blocks:
                self._ear.recv()
            else:
                await asyncio.to_thread(self._ear.recv)


# What the test sees of them.


class Process(Rank):
    """A process of the run and all of its messages, read at once so that it never waits for the test."""

    def __init__(self, news: threading.Condition, main: Callable[..., Any], *args: object) -> None:
        """news: where to say that there are some."""
        ear, self._mouth = multiprocessing.Pipe(duplex=False)
        super().__init__(main, (*args, ear), {})
        ear.close()
        self.words: list[Word] = []
        self._error: BaseException | None = None
        self._is_over = False
        self._news = news
        self._listener = threading.Thread(target=self._listen)
        self._listener.start()

    def _listen(self) -> None:
        while True:
            try:
                word = self._ear.recv()
            except (EOFError, OSError):
                word = None
            with self._news:
                if word is None:
                    self._is_over = True
                elif isinstance(word, BaseException):
                    self._error = word
                else:
                    self.words.append(word)
                self._news.notify_all()
            if word is None:
                return

    def go_on(self) -> None:
        """Let it go on from where it holds, or will hold. A server stops."""
        self._mouth.send("go on")

    def figures(self) -> Figures:
        """Of a server, now."""
        with self._news:
            before = self._num_figures()
        self._mouth.send("figures")
        with self._news:
            assert self._news.wait_for(lambda: self._num_figures() > before, SECONDS)
            return [word for word in self.words if isinstance(word, Figures)][-1]

    def _num_figures(self) -> int:
        return sum(isinstance(word, Figures) for word in self.words)

    def until(self, wanted: Callable[[Word], bool], seconds: float = SECONDS) -> Word:
        """The first such word, already said or still to come. Raises the error that ended it."""
        seen = 0
        deadline = time.monotonic() + seconds
        with self._news:
            while True:
                for word in self.words[seen:]:
                    if wanted(word):
                        return word
                seen = len(self.words)
                self._wait(deadline)

    def _wait(self, deadline: float) -> None:
        if self._error is not None:
            raise self._error
        assert not self._is_over, f"it has ended; it had said {self._tail()}"
        assert self._news.wait(deadline - time.monotonic()), f"nothing more came in time after {self._tail()}"

    def _tail(self) -> str:
        return ", ".join(str(word)[:100] for word in self.words[-8:])

    def until_step(self, kind: type[Any], step: int) -> Any:
        """Such a word of this step, or a later one."""
        return self.until(lambda word: isinstance(word, kind) and word.step >= step)

    def last_step(self) -> int:
        """Of a server."""
        with self._news:
            return max((word.step for word in self.words if isinstance(word, Stepped)), default=0)

    def ends(self, seconds: float = SECONDS) -> int | None:
        """Its exit code. Raises the error that ended it."""
        deadline = time.monotonic() + seconds
        with self._news:
            while not self._is_over:
                self._wait(deadline)
            if self._error is not None:
                raise self._error
        return self.finish(seconds)

    def joins(self) -> bool:
        """Whether it does, or dies before that."""
        with self._news:
            assert self._news.wait_for(lambda: self._is_over or self.words, SECONDS)
        return bool(self.words)

    def dies(self) -> None:
        """It ends as its point says."""
        assert self.ends() == -signal.SIGKILL

    def close(self) -> None:
        self._process.kill()
        self._listener.join()
        super().close()
        self._mouth.close()


class Run:
    """A server's port and all processes started for it; they have ended at the end of the `with`."""

    def __init__(self, num_workers: int, *, samples: int = 13, size: Size = USUAL, **settings: Any) -> None:
        quick = {"heartbeat_seconds": 0.5, "timeout_seconds": 10.0, "join_seconds": SECONDS, "chunk_bytes": 65_536}
        self.settings = GradientServerSettings(
            **{"workers": num_workers, "samples": samples, "port": free_port(), "token": TOKEN, **quick, **settings}
        )
        self.size = size
        self._news = threading.Condition()
        self.servers: list[Process] = []
        self.workers: dict[str, list[Process]] = {}
        """By name: a process, and those that took its place."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in (*self.servers, *itertools.chain(*self.workers.values())):
            process.close()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.settings.port}"

    def start_server(self, point: Point | None = None, **settings: Any) -> Process:
        process = Process(self._news, serve, replace(self.settings, **settings), point)
        self.servers.append(process)
        process.until(lambda word: isinstance(word, Listening))
        return process

    def start_worker(self, name: str, manner: Manner = PLAIN, *, waits: bool = True) -> Process:
        """waits: until it has joined, so that workers' ids are in the order of their starts."""
        process = Process(self._news, work, self.address, name, self.size, manner)
        self.workers.setdefault(name, []).append(process)
        if waits:
            process.until(lambda word: isinstance(word, Joined))
        return process

    def start(self, manners: Mapping[str, Manner], point: Point | None = None) -> tuple[Process, dict[str, Process]]:
        """The server, and workers that join in this order."""
        server = self.start_server(point)
        return server, {name: self.start_worker(name, manner) for name, manner in manners.items()}

    def wait_for(self, is_so: Callable[[], bool]) -> None:
        """Until this can be seen by what was said."""
        with self._news:
            assert self._news.wait_for(is_so, SECONDS)

    def finish(self, began_with: str | None = None) -> Checked:
        """Wait for the remaining processes to end normally, then check all of their messages.

        began_with: the worker whose initial weights all took, if it ended before it applied a step.
        """
        for process in (*(each[-1] for each in self.workers.values()), self.servers[-1]):
            assert process.ends() in (0, -signal.SIGKILL)
        found = Checked(self, began_with or self._first())
        found.every_sample_was_counted_once()
        found.every_step_is_one_process_s()
        return found

    def _first(self) -> str:
        """The only one that has begun with its own weights."""
        first = {
            name: next((word for word in processes[0].words if isinstance(word, Applied | Loaded)), None)
            for name, processes in self.workers.items()
        }
        (name,) = [name for name, word in first.items() if isinstance(word, Applied)]
        return name


class Checked:
    """The history of a run."""

    def __init__(self, run: Run, began_with: str) -> None:
        self._run = run
        self.steps = [word for server in run.servers for word in server.words if isinstance(word, Stepped)]
        histories = [process.words for each in run.workers.values() for process in each]
        self._histories = [
            [word for word in words if isinstance(word, Applied | Loaded | Ended)] for words in histories
        ]
        self._reference = _Reference(began_with, run.settings.samples, run.size)

    @property
    def shares(self) -> dict[int, dict[int, tuple[int, int]]]:
        """By step: the latest of those that were completed."""
        return {word.step: word.shares for word in self.steps}

    def every_sample_was_counted_once(self) -> None:
        """In every step, over all workers that took part; and each server completed each step once."""
        for word in self.steps:
            covered = sorted(share for share in word.shares.values() if share[0] < share[1])
            edges = [0, *(end for _, end in covered)]
            assert [start for start, _ in covered] == edges[:-1], word
            assert edges[-1] == self._run.settings.samples, word
        for server in self._run.servers:
            steps = [word.step for word in server.words if isinstance(word, Stepped)]
            assert steps == sorted(set(steps)), steps

    def every_step_is_one_process_s(self) -> None:
        """What each worker had after each step, and after each state that it was given."""
        for history in self._histories:
            step: int | None = None
            for word in history:
                if isinstance(word, Applied):
                    assert step in (None, word.step), history
                    self._reference.expect_loss(word.step, word.loss)
                step = word.step + 1 if isinstance(word, Applied) else word.step
                if isinstance(word, Ended):
                    self._reference.expect_weights(step, word.weights)
                else:
                    self._reference.expect_probe(step, word.probe)


class _Reference:
    """One process's weights by step, begun with those of this name."""

    def __init__(self, name: str, samples: int, size: Size) -> None:
        self._training = alone(name, samples, size)
        self._samples = samples
        self._probes: list[list[float]] = []
        self._values: list[list[Any]] = []

    def expect_probe(self, step: int, probe: Sequence[float]) -> None:
        self._advance(step)
        worst = float(numpy.abs(numpy.subtract(probe, self._probes[step])).max())
        assert worst < CLOSE, f"before step {step}: {worst}"

    def expect_weights(self, step: int, weights: Sequence[Any]) -> None:
        self._advance(step)
        for mine, expected in zip(weights, self._values[step], strict=True):
            assert float(numpy.abs(mine - expected).max()) < CLOSE

    def expect_loss(self, step: int, loss: float) -> None:
        assert abs(loss - sample_loss(step, 0, self._samples)) < CLOSE, (step, loss)

    def _advance(self, step: int) -> None:
        while len(self._probes) <= step:
            weights = next(self._training)
            self._probes.append(weights.probe())
            self._values.append([each.copy() for each in weights.values])
