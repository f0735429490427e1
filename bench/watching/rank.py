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
from parallel3d.coordinator import Coordinator
from parallel3d.last_steps import LastSteps
from parallel3d.trainer import Steps, SupervisorOwner, facts_of, sending_events
from runtime.control import rank_control
from runtime.loop import run

TURNS = ("off", "on", "asked")
_TURN_SECONDS = 1.0
_SETTLING = 2  # steps of a turn that don't count: what the turn before has left is worked off in them


async def take_turns(rounds: int, folder: Path) -> dict[str, list[float]]:
    """Mean seconds of a step, by kind of turn, one for each round."""
    config = load_config(folder / "config.yaml", environ={})
    control = rank_control()
    assert control is not None
    owner = SupervisorOwner(control)
    try:
        async with Coordinator.from_config(config) as coordinator:
            turns = Turns(coordinator, owner)
            await turns.warm_up()
            return await turns.take(rounds)
    finally:
        await owner.close()


def batch_of(coordinator: Coordinator) -> tuple[torch.Tensor, torch.Tensor]:
    config, dp = coordinator.config, coordinator.mesh.dp
    shape = config.batch_size // dp.size, config.model.args.sequence
    inputs, targets = torch.randint(0, 256, (2, *shape), generator=torch.Generator().manual_seed(dp.rank))
    return inputs, targets


class Switch:
    """Turns recording off and on as `monitoring.enabled` does, in one coordinator: two would have their weights in
    different places, and one of them may be faster by more than what is measured here."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator, self._recorder = coordinator, coordinator.recorder
        table = coordinator._part.blueprint.table
        self._executors = {True: coordinator._executor, False: coordinator._make_executor(table)}

    def turn(self, on: bool) -> None:
        coordinator, recorder = self._coordinator, self._recorder if on else None
        coordinator._executor = self._executors[on]
        coordinator.recorder = coordinator._events.recorder = coordinator.mesh.collectives.events_into = recorder


class Turns:
    """The same steps, watched and not."""

    def __init__(self, coordinator: Coordinator, owner: SupervisorOwner) -> None:
        self._coordinator, self._mesh, self._owner = coordinator, coordinator.mesh, owner
        self._switch, self._batch = Switch(coordinator), batch_of(coordinator)
        self._steps = Steps(coordinator, owner, LastSteps(coordinator.mesh, coordinator.recorder))

    async def warm_up(self) -> None:
        """The first steps load what torch loads late; then as many a turn as take about its time."""
        self._owner.send("ready", **facts_of(self._coordinator))
        for on in (True, False):
            self._switch.turn(on)
            for _ in range(5):
                await self._coordinator.train_step(self._batch)
        start = time.perf_counter()
        for _ in range(5):
            await self._coordinator.train_step(self._batch)
        num = torch.tensor([_TURN_SECONDS / ((time.perf_counter() - start) / 5)])
        self._num_steps = _SETTLING + max(1, int(await self._mesh.world.broadcast(num, root=0)))

    async def take(self, rounds: int) -> dict[str, list[float]]:
        seconds: dict[str, list[float]] = {name: [] for name in TURNS}
        for number in range(rounds):
            for name in TURNS if number % 2 else TURNS[::-1]:
                seconds[name].append(await self._turn(name))
        return seconds

    async def _turn(self, name: str) -> float:
        self._switch.turn(name != "off")
        if self._mesh.rank == 0:
            self._owner.send("turn", name=name)
        with sending_events(self._coordinator, self._owner):
            for number in range(self._num_steps):
                if number == _SETTLING:
                    start = time.perf_counter()
                await self._steps.make(self._batch)
            return (time.perf_counter() - start) / (self._num_steps - _SETTLING)


def main() -> None:
    rounds, result, folder = sys.argv[1:]
    found = run(lambda: take_turns(int(rounds), Path(folder)))
    if os.environ["RANK"] == "0":
        Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
