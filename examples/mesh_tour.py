"""Form a mesh, print its ranks, and check a collective on each group.

parallel3d launch -n 8 examples/mesh_tour.py configs/mesh-2x2x2.yaml
"""

import sys

import torch

import parallel3d


def table(mesh: parallel3d.Mesh) -> str:
    """A line a rank: its coordinates, the ranks of its groups, its host."""
    lines = [f"{'rank':>4}  {'dp tp pp':<8}  {'dp group':<12} {'tp group':<12} {'pp group':<12} host"]
    for rank in range(mesh.world_size):
        coords = " ".join(f"{i:>2}" for i in mesh.topology.coords(rank))
        groups = [" ".join(map(str, mesh.topology.group(axis, rank))) for axis in ("dp", "tp", "pp")]
        lines.append(f"{rank:>4}  {coords:<8}  {groups[0]:<12} {groups[1]:<12} {groups[2]:<12} {mesh.hosts[rank]}")
    return "\n".join(lines)


async def check(mesh: parallel3d.Mesh, group: parallel3d.Group) -> bool:
    """All-reduce rank numbers over the group; whether the sum is correct on every rank of the mesh."""
    tensor = group.empty(1 << 16)
    tensor.fill_(mesh.rank)
    await group.all_reduce(tensor, op="sum", timeout=10.0)
    correct = torch.tensor(float((tensor == sum(group.ranks)).all()))
    await mesh.world.all_reduce(correct, op="min")
    return bool(correct)


async def main() -> None:
    async with parallel3d.mesh(sys.argv[1]) as mesh:
        if mesh.rank == 0:
            print(table(mesh))
        for group in (mesh.world, mesh.dp, mesh.tp, mesh.pp):
            correct = await check(mesh, group)
            if mesh.rank == 0:
                print(f"all_reduce on {group.name:<5} ({group.size} ranks, {group.transport_name}): "
                      f"{'correct on every rank' if correct else 'WRONG'}")  # fmt: skip
            if not correct:
                sys.exit(1)


parallel3d.run(main)
