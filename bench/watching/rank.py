"""A rank of bench/monitoring.py: the same steps, watched and not, in turns.

In a folder of its own, because there it hides no package of ours.
"""

from __future__ import annotations

import json
import os
import sys
import time
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
"""Of a turn, that don't count: what the turn before has left is worked off in them."""


async def take_turns(rounds: int, pairs: int, folder: Path) -> dict[str, list[float]]:
    """Seconds of a step, one for each round: its mean by kind of turn, and single ones with recording off and on."""
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
    """Turns recording off and on as `monitoring.enabled` does, in one coordinator and executor: two would have weights
    and messages in different places, and one of them may be faster by more than what is measured here."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator, self._recorder = coordinator, coordinator.recorder
        silent = coordinator._make_executor(coordinator._part.blueprint.table)
        self._processors = {True: coordinator._executor._processor, False: silent._processor}

    def turn(self, on: bool) -> None:
        coordinator, executor, recorder = self._coordinator, self._coordinator._executor, self._recorder if on else None
        executor._recorder, executor._processor = recorder, self._processors[on]
        coordinator.recorder = coordinator._events.recorder = coordinator.mesh.collectives.events_into = recorder


class Turns:
    """The same steps, watched and not."""

    def __init__(self, coordinator: Coordinator, reporter: SupervisorReporter) -> None:
        self._coordinator, self._mesh, self._reporter = coordinator, coordinator.mesh, reporter
        self._switch, self._batch = Switch(coordinator), batch_of(coordinator)
        self._steps = Steps(coordinator, reporter, LastSteps(coordinator.mesh, coordinator.recorder))

    async def warm_up(self) -> None:
        """The first steps load what torch loads late; then as many a turn as take about its time."""
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
            self._tell(name)
            seconds = await self._make_steps(TURN_SECONDS)
            self._tell("settling")
        return seconds

    async def _make_steps(self, seconds: float) -> float:
        """About so many seconds of them; gives one's mean."""
        start, num = time.perf_counter(), max(1, int(seconds * self._steps_a_second))
        for _ in range(num):
            await self._steps.make(self._batch)
        return (time.perf_counter() - start) / num

    def _tell(self, turn: str) -> None:
        if self._mesh.rank == 0:
            self._reporter.send("turn", name=turn)

    async def alternate(self, pairs: int) -> dict[str, list[float]]:
        """One step without recording and one with it, again and again: this machine's speed changes from second to
        second by more than what a record costs."""
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
