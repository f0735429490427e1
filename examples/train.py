"""Training in a script of your own: parallel3d launch -n 8 examples/train.py configs/mesh-2x2x2.yaml"""

from __future__ import annotations

import sys

import parallel3d

EVERY = 20  # steps


async def main() -> None:
    config = sys.argv[1] if len(sys.argv) > 1 else "configs/single.yaml"
    async with parallel3d.Coordinator.from_config(config) as coordinator:
        is_first = coordinator.mesh.rank == 0
        async for batch in coordinator.batches():
            step = await coordinator.train_step(batch)
            if step.step % EVERY == 0:
                loss = await coordinator.eval_step(batch)  # on every rank: they compute it together
                if is_first:
                    print(f"step {step.step}: loss {step.loss:.4f}, {loss:.4f} after the update")
        if is_first:
            print(coordinator.performance().report())


parallel3d.run(main)
