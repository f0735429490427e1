"""The optimizer step over the whole mesh: norm, clipping, update, and the all-gather of sharded weights."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.autograd.graph import increment_version

from parallel3d.config.sections import Optimizer as OptimizerConfig
from parallel3d.gradients.buckets import Bucket, Counts, FlatBucket
from parallel3d.gradients.reducer import GradientSync
from parallel3d.optim.clip import SquaredNorm, clip_factor
from parallel3d.optim.fused import Update, update_of
from parallel3d.rank_mesh import Mesh
from process_groups.tensor_exchange import Outcome
from runtime.errors import NonFiniteGradient, name_rank

Scale = Callable[[Sequence[float]], float]


class Taken(NamedTuple):
    """A step that was taken; the same on every rank."""

    norm: float
    """Of all gradients of the mesh, before clipping."""
    sums: tuple[float, ...]
    """Over all ranks, of the numbers they reported."""


class StatePart(NamedTuple):
    """The optimizer's state for elements `start` to `stop` of a flattened parameter: all of them, unless the state is
    sharded. `values` are views into the optimizer's memory."""

    parameter: nn.Parameter
    start: int
    stop: int
    values: dict[str, torch.Tensor]


class Optimizer:
    """Updates the weights of a GradientSync's buckets. Make it on the event loop.

    counts: whether this rank counts a parameter in the norm; one that several ranks have must count once.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        sync: GradientSync,
        mesh: Mesh,
        counts: Counts = lambda _: True,
    ) -> None:
        self._config, self._sync, self._mesh = config, sync, mesh
        self._norm = SquaredNorm(sync.buckets, mesh.dp.rank, counts)
        self._slice = mesh.dp.rank if sync.is_sharded else None
        """The slice of each bucket that this rank updates; None: all of it."""
        self._updates: dict[torch.dtype, Update] = {}
        self._buckets: dict[torch.dtype, list[Bucket]] = {}
        for bucket in sync.buckets:
            self._updates.setdefault(bucket.dtype, update_of(config)).add(bucket.weights(self._slice))
            self._buckets.setdefault(bucket.dtype, []).append(bucket)
        self.met = 0.0, 0.0
        """time.monotonic() before and after the last step's exchange of norms."""
        self.num_steps = 0
        """Steps taken. Set it when the state of an earlier run is loaded."""
        # From the engine thread directly: by the event loop, each exchange would cost two thread switches.
        self._exchange = mesh.world.tensor_exchange() if mesh.world_size > 1 else None

    async def step(self, lr: float) -> float:
        """As `take`, without reported numbers; returns the norm."""
        return (await self.take(lr)).norm

    async def take(self, lr: float, reported: Sequence[float] = (), scale: Scale = lambda _: 1.0) -> Taken:
        """Update the weights, once gradients are reduced.

        reported: numbers of this rank, which are summed over all ranks in one exchange with the norm.
        scale: from those sums, the factor that gradients are multiplied with before clipping.

        Raises NonFiniteGradient on every rank, and leaves the weights as they are, where the norm is not finite. If it
        is cancelled, or fails otherwise, the mesh's groups are closed.
        """
        stepping = asyncio.ensure_future(self._mesh.compute(self._take, lr, reported, scale))
        try:
            taken = await asyncio.shield(stepping)
            if self._sync.is_sharded:
                await self._gather()
            return taken
        except NonFiniteGradient:
            raise
        except BaseException as error:  # some ranks may have new weights, and others old ones
            self._mesh.fail(error)
            await asyncio.gather(stepping, return_exceptions=True)  # it ends soon: its groups are closed
            raise

    # In the engine thread.

    def _take(self, lr: float, reported: Sequence[float], scale: Scale) -> Taken:
        numbers = [self._norm(), *reported]
        start = time.monotonic()
        rows = self._from_all(numbers)
        self.met = start, time.monotonic()
        squares, *columns = zip(*rows, strict=True)
        sums = [math.fsum(column) if all(map(math.isfinite, column)) else sum(column) for column in columns]
        factor = scale(sums)
        norm = factor * math.sqrt(sum(squares))
        if not all(map(math.isfinite, (norm, *sums))):
            raise self._not_finite(norm, self._culprits(rows))
        self._update(lr, norm, factor)
        return Taken(norm, tuple(sums))

    def _from_all(self, numbers: list[float]) -> list[list[float]]:
        """Every rank's numbers."""
        exchange = self._exchange
        if exchange is None:
            return [numbers]
        exchange.room((1, len(numbers)), torch.float64).copy_(torch.tensor([numbers], dtype=torch.float64))
        exchange.post(Outcome.ALL_GATHER)
        rows: list[list[float]] = exchange.result().tolist()
        return rows

    def _update(self, lr: float, norm: float, scale: float) -> None:
        self.num_steps += 1
        factor = scale * clip_factor(norm, self._config.clip_norm)
        for dtype, update in self._updates.items():
            gradients = [each for bucket in self._buckets[dtype] for each in bucket.gradients(self._slice)]
            update(gradients, self.num_steps, lr, factor)
        increment_version(self._sync.parameters)  # they were written through other tensors
        self._sync.release()

    async def _gather(self) -> None:
        dp = self._mesh.dp
        works = [
            dp.all_gather(*bucket.weights(self._slice), out=bucket.flat_weights)
            for bucket in self._sync.buckets
            if isinstance(bucket, FlatBucket)
        ]
        for work in works:
            await work

    def _culprits(self, rows: Sequence[Sequence[float]]) -> list[int]:
        """The ranks that reported numbers that are not finite; else those whose local gradients are not; else those
        whose share of the sums is not."""
        reported, shares = [numbers[1:] for numbers in rows], [numbers[:1] for numbers in rows]
        local = self._from_all([0.0 if self._are_local_grads_finite() else math.inf])
        return _not_all_finite(reported) or _not_all_finite(local) or _not_all_finite(shares)

    def _are_local_grads_finite(self) -> bool:
        return all(bool(each.isfinite().all()) for bucket in self._sync.buckets for each in bucket.local_grads)

    def _not_finite(self, norm: float, ranks: Sequence[int]) -> NonFiniteGradient:
        names = ", ".join(name_rank(rank, self._mesh.topology.coords(rank)) for rank in ranks)
        return NonFiniteGradient(
            f"the norm of the gradients is {norm}: those of {names} are not all finite. The weights are as they were "
            "before this step. Look at its samples, or lower optimizer.lr.",
            ranks=tuple(ranks),
        )

    @property
    def state_bytes(self) -> int:
        """Memory of the state."""
        kept = (update.state(index) for update in self._updates.values() for index in range(len(update.weights)))
        return sum(value.nbytes for values in kept for value in values.values())

    def state(self) -> list[StatePart]:
        """The state by parameter; `num_steps` is not part of it."""
        found = []
        for dtype, buckets in self._buckets.items():
            pieces = [piece for bucket in buckets for piece in bucket.parts(self._slice)]
            for index, piece in enumerate(pieces):
                kept = {name: each.view(-1) for name, each in self._updates[dtype].state(index).items()}
                for parameter, start, stop, offset in piece:
                    values = {name: each[offset : offset + stop - start] for name, each in kept.items()}
                    found.append(StatePart(parameter, start, stop, values))
        return found


def _not_all_finite(rows: Sequence[Sequence[float]]) -> list[int]:
    return [rank for rank, numbers in enumerate(rows) if not all(map(math.isfinite, numbers))]
