"""A plain torch training loop whose gradients a gradient server averages over its workers:

parallel3d serve-gradients --workers 2 --samples 64 --steps 100
python examples/gradient_worker.py 127.0.0.1:9000    # twice, on any hosts that reach the server
"""

from __future__ import annotations

import sys

import torch
from torch import nn

import parallel3d

EVERY = 20  # steps


def samples(step: int, total: int) -> tuple[torch.Tensor, torch.Tensor]:
    """All samples of a step, the same on every worker."""
    x = torch.rand(total, 1, generator=torch.Generator().manual_seed(step))
    return x, torch.sin(6 * x)


async def main() -> None:
    model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    async with parallel3d.GradientWorker(sys.argv[1]) as worker:
        worker.attach(model, optimizer)  # all workers start with the first one's weights
        async for share in worker.shares():
            x, y = samples(share.step, share.total)
            loss = nn.functional.mse_loss(model(x[share.start : share.end]), y[share.start : share.end])
            optimizer.zero_grad()
            loss.backward()
            try:
                average = await worker.average(loss=loss)  # into every .grad, whole or not at all
            except parallel3d.ShareChanged:
                continue  # a worker joined or left: the samples are divided again
            optimizer.step()
            if share.step % EVERY == 0:
                print(f"step {share.step}: samples {share.start} to {share.end}, loss of all {average.loss:.4f}")
    print(f"weights add up to {sum(each.sum().item() for each in model.parameters()):.6f}")


parallel3d.run(main)
