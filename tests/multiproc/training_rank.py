"""One rank of meshes that train, one after the other, and compare with one process."""

import itertools
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import parallel3d
from tests.training import SCHEDULES, check, meshes, settings

PRECISIONS = {
    "float64": {},
    "float32": {"train__precision": "float32", "optimizer__name": "sgd", "optimizer__lr": 0.1},
}


def variants(world_size: int, precision: str) -> list[dict]:
    """Every mesh of that size. What else can be chosen goes round, so that each choice meets many meshes."""
    schedules, numbers, found = itertools.cycle(SCHEDULES), itertools.count(), []
    for dp, tp, pp in meshes(world_size):
        number = next(numbers)
        more = {"model__args__tied": number % 2 == 1, "optimizer__shard": dp > 1 and number % 3 != 1}
        if tp > 1:
            more["parallel__sequence_parallel"] = number % 2 == 0 and 8 % tp == 0
        schedule = next(schedules) if pp > 1 else "1f1b"
        found.append(settings(dp, tp, pp, schedule, **more, **PRECISIONS[precision]))
    return found


async def main() -> None:
    for given in variants(int(os.environ["WORLD_SIZE"]), os.environ["PRECISION"]):
        try:
            await check(given)
        except BaseException as error:
            error.add_note(f"with {given}")
            raise


parallel3d.run(main)
