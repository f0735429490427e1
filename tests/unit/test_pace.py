"""Who is far ahead is held back, for moments."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import numpy
import pytest

from runtime import pace as pace_module
from runtime.pace import Pace
from runtime.sample_shares import even
from runtime.step_sum import WHOLE, StepSum

MIB = 1 << 20
LONG = 1 << 24


@dataclass
class StandInLink:
    is_paused: bool = False
    num_pauses: int = 0

    def pause(self) -> None:
        self.is_paused, self.num_pauses = True, self.num_pauses + 1

    def resume(self) -> None:
        self.is_paused = False


@dataclass
class Worker:
    link: StandInLink = field(default_factory=StandInLink)


class Sending:
    """Workers whose gradients come a MiB at a time."""

    def __init__(self, num_workers: int) -> None:
        self.workers = {number: Worker() for number in range(num_workers)}
        self.pace = Pace(self.workers)  # type: ignore[arg-type]
        self.open()

    def open(self) -> None:
        self.sum = StepSum(0, 0, even(8, list(self.workers)))
        self.positions = dict.fromkeys(self.workers, 0)

    def send(self, worker: int, num_pieces: int = 1) -> None:
        for _ in range(num_pieces):
            if not self.positions[worker]:
                self.sum.begin(worker, WHOLE, LONG)
            values = numpy.zeros(MIB // 4, numpy.float32)
            self.sum.add(worker, WHOLE, self.positions[worker], values)
            self.positions[worker] += len(values)
            self.pace.moved(self.sum, worker)

    @property
    def held(self) -> list[int]:
        return [number for number, worker in self.workers.items() if worker.link.is_paused]


@pytest.fixture
def without_end(monkeypatch):
    """Nobody is let go because time has passed."""
    monkeypatch.setattr(pace_module, "_MOST_SECONDS", 3600)


async def test_one_far_ahead_waits_until_the_last_has_come_near(without_end):
    sending = Sending(3)
    sending.send(1)
    sending.send(2)
    sending.send(0, 3)
    assert sending.held == []
    sending.send(0)
    assert sending.held == [0]
    sending.send(1, 2)
    assert sending.held == [0]  # worker 2 is still where it was
    sending.send(2)
    assert sending.held == []
    sending.pace.end()


async def test_who_has_not_begun_holds_nobody_back(without_end):
    sending = Sending(2)
    sending.send(0, 8)
    assert sending.held == []
    sending.send(1)
    assert sending.held == []  # the one behind is never held
    sending.pace.end()


async def test_nobody_is_held_for_long(monkeypatch):
    monkeypatch.setattr(pace_module, "_MOST_SECONDS", 0.001)
    sending = Sending(2)
    sending.send(1)
    sending.send(0, 4)
    assert sending.held == [0]
    async with asyncio.timeout(10):
        while sending.held:  # noqa: ASYNC110 - a timer of its own lets it go
            await asyncio.sleep(0.001)
    sending.send(0)
    assert sending.held == []  # it has waited, and may go on for a while
    sending.send(0)
    assert sending.held == [0]
    sending.pace.end()


async def test_the_end_of_a_step_lets_all_go(without_end):
    sending = Sending(2)
    sending.send(1)
    sending.send(0, 4)
    assert sending.held == [0]
    sending.pace.end()
    assert sending.held == []
    sending.open()
    sending.send(1)
    sending.send(0, 4)
    assert sending.held == [0]  # as in the step before
    sending.pace.end()


async def test_one_that_is_lost_while_it_is_held(without_end):
    sending = Sending(2)
    sending.send(1)
    sending.send(0, 4)
    del sending.workers[0]
    sending.send(1, 3)
    sending.pace.end()
