"""Compute while an all-reduce runs.

parallel3d launch -n 2 examples/overlap.py
"""

import torch

import parallel3d


async def main() -> None:
    async with parallel3d.mesh(dp=2) as mesh:
        gradients = mesh.world.empty(1 << 20)
        gradients.fill_(mesh.rank)
        inputs, weights = torch.ones(256, 512), torch.ones(512, 128)

        work = mesh.dp.all_reduce(gradients, op="mean")  # starts here: don't touch the tensor…
        outputs = await mesh.compute(torch.mm, inputs, weights)  # …while this runs on the engine thread
        await work  # …until here

        if mesh.rank == 0:
            print(f"mean of the ranks {gradients[0].item()}, computed meanwhile {outputs[0, 0].item()}")


parallel3d.run(main)
