"""One rank that exchanges tensors with all others, and compares cut models with whole ones."""

import copy
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

import parallel3d
from tests.support.tensor_models import Mlp, Parallel, check_model, make, whole_step
from tests.support.tensor_ranks import check_exchanges


async def main() -> None:
    size, backend = int(os.environ["WORLD_SIZE"]), os.environ.get("BACKEND", "auto")
    model = make(Parallel, Mlp)
    expected = whole_step(copy.deepcopy(model))
    async with parallel3d.mesh(tp=size, threads=1, backend=backend) as mesh:
        exchange = mesh.tp.tensor_exchange()
        await mesh.compute(check_exchanges, exchange, in_rank_order=backend == "auto")
        for sequence_parallel in (False, True):
            await mesh.compute(check_model, exchange, model, expected, sequence_parallel=sequence_parallel)


parallel3d.run(main)
