"""Pass a tensor from stage to stage: each doubles it and sends it on.

parallel3d launch -n 4 examples/send_recv.py
"""

import torch

import parallel3d


async def main() -> None:
    async with parallel3d.mesh(pp=4) as mesh:
        stage, last = mesh.pp.rank, mesh.pp.size - 1  # ranks of a call count within the group
        tensor = torch.ones(3)
        if stage > 0:
            await mesh.pp.recv(tensor, src=stage - 1)
        tensor *= 2
        if stage < last:
            await mesh.pp.send(tensor, dst=stage + 1)
        else:
            print(f"after {mesh.pp.size} stages: {tensor.tolist()}")


parallel3d.run(main)
