"""A rank of bench/monitoring.py: the same steps with and without monitoring, in turns.

Not in bench/, where monitoring.py would hide one of our packages.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from parallel3d.config import load_config
from parallel3d.runs.rank_loop import LastSteps, Steps, SupervisorReporter, facts_of, sending_events
from parallel3d.training.coordinator import Coordinator
from runtime.control import rank_control
from runtime.loop import run

TURNS = ("off", "on", "asked")
TURN_SECONDS = 5.0
SETTLING_SECONDS = 3.0
"""At the start of a turn, not counted: work left by the turn before ends in them."""


async def take_turns(rounds: int, pairs: int, folder: Path) -> dict[str, list[float]]:
    """Seconds of a step: the mean of each turn by its kind, and single steps with recording off and on."""
    config = load_config(folder / "config.yaml", environ={})
    control = rank_control()
    assert control is not None
    reporter = SupervisorReporter(control)
    try:
        async with Coordinator.from_config(config) as coordinator:
            turns = Turns(coordinator, reporter)
            await turns.warm_up()
            return {**await turns.take(rounds), **await turns.alternate(pairs)}
    finally:
        await reporter.close()


def batch_of(coordinator: Coordinator) -> tuple[torch.Tensor, torch.Tensor]:
    config, dp = coordinator.config, coordinator.mesh.dp
    shape = config.batch_size // dp.size, config.model.args.sequence
    inputs, targets = torch.randint(0, 256, (2, *shape), generator=torch.Generator().manual_seed(dp.rank))
    return inputs, targets


class Switch:
    """Turns recording off and on as `monitoring.enabled` does, inside one coordinator and executor: the weights and
    messages of two have other addresses, which may change a step's time by more than what is measured here."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator, self._recorder = coordinator, coordinator.recorder
        context = coordinator._executor._context
        self._contexts = {True: context, False: replace(context, recorder=None)}

    def turn(self, on: bool) -> None:
        coordinator, recorder = self._coordinator, self._recorder if on else None
        coordinator._executor._context = self._contexts[on]
        coordinator.recorder = coordinator._events.recorder = coordinator.mesh.collectives.events_into = recorder


class Turns:
    """The same steps with and without monitoring."""

    def __init__(self, coordinator: Coordinator, reporter: SupervisorReporter) -> None:
        self._coordinator, self._mesh, self._reporter = coordinator, coordinator.mesh, reporter
        self._switch, self._batch = Switch(coordinator), batch_of(coordinator)
        self._steps = Steps(coordinator, reporter, LastSteps(coordinator.mesh, coordinator.recorder))

    async def warm_up(self) -> None:
        """Make first steps, in which torch loads what it needs, and measure how many fit a turn."""
        self._reporter.send("ready", **facts_of(self._coordinator))
        for on in (True, False):
            self._switch.turn(on)
            for _ in range(5):
                await self._coordinator.train_step(self._batch)
        start = time.perf_counter()
        for _ in range(5):
            await self._coordinator.train_step(self._batch)
        rate = torch.tensor([5 / (time.perf_counter() - start)])
        self._steps_a_second = float(await self._mesh.world.broadcast(rate, root=0))

    async def take(self, rounds: int) -> dict[str, list[float]]:
        seconds: dict[str, list[float]] = {name: [] for name in TURNS}
        for number in range(rounds):
            for name in TURNS if number % 2 else TURNS[::-1]:
                seconds[name].append(await self._turn(name))
        return seconds

    async def _turn(self, name: str) -> float:
        self._switch.turn(name != "off")
        with sending_events(self._coordinator, self._reporter):
            await self._make_steps(SETTLING_SECONDS)
            self._announce(name)
            seconds = await self._make_steps(TURN_SECONDS)
            self._announce("settling")
        return seconds

    async def _make_steps(self, seconds: float) -> float:
        """Make steps for about that long; returns their mean seconds."""
        start, num = time.perf_counter(), max(1, int(seconds * self._steps_a_second))
        for _ in range(num):
            await self._steps.make(self._batch)
        return (time.perf_counter() - start) / num

    def _announce(self, turn: str) -> None:
        if self._mesh.rank == 0:
            self._reporter.send("turn", name=turn)

    async def alternate(self, pairs: int) -> dict[str, list[float]]:
        """Single steps without and with recording, alternating, because the machine's speed changes from second to
        second by more than recording costs."""
        seconds: dict[str, list[float]] = {"unrecorded": [], "recorded": []}
        with sending_events(self._coordinator, self._reporter):
            for number in range(2 * pairs):
                on = number % 4 in (1, 2)  # each goes first as often as the other
                self._switch.turn(on)
                start = time.perf_counter()
                await self._steps.make(self._batch)
                seconds["recorded" if on else "unrecorded"].append(time.perf_counter() - start)
        return seconds


def main() -> None:
    rounds, pairs, result, folder = sys.argv[1:]
    found = run(lambda: take_turns(int(rounds), int(pairs), Path(folder)))
    if os.environ["RANK"] == "0":
        Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
