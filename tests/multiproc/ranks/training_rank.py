"""One rank of meshes that train, one after the other, and compare with one process."""

import itertools
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

import parallel3d
from tests.support.training import (
    FLOAT32,
    HUGGING_FACE_TOLERANCE,
    SCHEDULES,
    check,
    check_dropout,
    check_dropout_of_parts,
    meshes,
    of_a_hugging_face_model,
    of_a_users_model,
    settings,
)

PRECISIONS = {"float64": {}, "float32": FLOAT32}


def variants(world_size: int, precision: str) -> list[dict]:
    """Every mesh of that size; where there are replicas, with optimizer state whole and sharded. What else can be
    chosen goes round, so that each choice meets many meshes and the others, and every schedule some."""
    schedules = itertools.islice(itertools.cycle(SCHEDULES), world_size, None)
    numbers, found = itertools.count(), []
    for dp, tp, pp in meshes(world_size):
        number = next(numbers)
        more = {"model__args__tied": number % 2 == 1}
        if tp > 1:
            more["parallel__sequence_parallel"] = number % 4 < 2 and 8 % tp == 0
        schedule = next(schedules) if pp > 1 else "1f1b"
        for shard in (False, True) if dp > 1 else (False,):
            choices = {**more, "optimizer__shard": shard, **PRECISIONS[precision]}
            found.append(settings(dp, tp, pp, schedule, **choices))
    return found


async def check_other_models() -> None:
    """One of a user's own, and one of Hugging Face."""
    await check(of_a_users_model(1, 2, 2))
    await check(of_a_hugging_face_model(1, 2, 2), HUGGING_FACE_TOLERANCE)


async def main() -> None:
    size = int(os.environ["WORLD_SIZE"])
    if os.environ["WHAT"] == "other models":
        await check_other_models()
        return
    if os.environ["WHAT"] == "float64" and size in (2, 4):
        for sequence_parallel in (False, True):
            await check_dropout(size, sequence_parallel=sequence_parallel)
    if os.environ["WHAT"] == "float64" and size == 2:
        await check_dropout_of_parts(size)
    for given in variants(size, os.environ["WHAT"]):
        try:
            await check(given)
        except BaseException as error:
            error.add_note(f"with {given}")
            raise


parallel3d.run(main)
