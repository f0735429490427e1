"""The optimizer step over the whole mesh: norm, clip, update, and the replicas' slices put together again."""

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
from parallel3d.gradients.reducer import GradientSync, farewell
from parallel3d.optim.fused import Update, update_of
from parallel3d.optim.norm import SquaredNorm
from parallel3d.rank_mesh import Mesh
from process_groups.tensor_exchange import Outcome
from runtime.errors import CommunicationError, NonFiniteGradient, name_rank

_TINY = 1e-6  # as in torch.nn.utils.clip_grad_norm_, so that clipped gradients are the same


Scale = Callable[[Sequence[float]], float]


class Taken(NamedTuple):
    """A step, the same on every rank."""

    norm: float
    """Of all gradients of the mesh, before they were clipped."""
    sums: tuple[float, ...]
    """Of what the ranks told."""


class StatePart(NamedTuple):
    """What the optimizer remembers of the elements `start` to `stop` of a parameter, flattened: all of them, unless the
    state is sharded. `values` are views: what is written there is remembered."""

    parameter: nn.Parameter
    start: int
    stop: int
    values: dict[str, torch.Tensor]


class Optimizer:
    """Updates the weights of a GradientSync's buckets. Make it on the event loop.

    `counts` says of a parameter whether this rank counts it in the norm: one that several ranks have counts once.
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
        """What this rank updates of each bucket."""
        self._updates: dict[torch.dtype, Update] = {}
        self._buckets: dict[torch.dtype, list[Bucket]] = {}
        for bucket in sync.buckets:
            self._updates.setdefault(bucket.dtype, update_of(config)).add(bucket.weights(self._slice))
            self._buckets.setdefault(bucket.dtype, []).append(bucket)
        self.met = 0.0, 0.0
        """When this rank came to the last step's exchange of norms, and when it had those of all ranks."""
        self.num_steps = 0
        """Steps taken. Set it where the state of an earlier run is put in."""
        # The engine thread's own way to the others: the event loop would cost two hand-overs an exchange.
        self._exchange = mesh.world.tensor_exchange() if mesh.world_size > 1 else None

    async def step(self, lr: float) -> float:
        """As `take`, with nothing to tell; gives the norm."""
        return (await self.take(lr)).norm

    async def take(self, lr: float, told: Sequence[float] = (), scale: Scale = lambda _: 1.0) -> Taken:
        """Once gradients are summed up: update the weights.

        told: numbers of this rank, which are added up over all ranks in one go with the norm.
        scale: what gradients are multiplied with before all else, by those sums.

        Raises NonFiniteGradient on every rank, and leaves the weights as they are, where the norm is not finite. If it
        is cancelled, or fails otherwise, the mesh's groups are closed.
        """
        stepping = asyncio.ensure_future(self._mesh.compute(self._take, lr, told, scale))
        try:
            taken = await asyncio.shield(stepping)
            if self._sync.is_sharded:
                await self._gather()
            return taken
        except NonFiniteGradient:
            raise
        except BaseException as error:  # some ranks' weights are new, and others' are not
            self._mesh.abort(error if isinstance(error, CommunicationError) else farewell(self._mesh, error))
            await asyncio.gather(stepping, return_exceptions=True)  # it ends soon, for its groups are closed
            raise

    # In the engine thread.

    def _take(self, lr: float, told: Sequence[float], scale: Scale) -> Taken:
        numbers = [self._norm(), *told]
        came = time.monotonic()
        rows = self._from_all(numbers)
        self.met = came, time.monotonic()
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
        limit = self._config.clip_norm
        factor = scale if limit is None else scale * min(1.0, limit / (norm + _TINY))
        for dtype, update in self._updates.items():
            gradients = [each for bucket in self._buckets[dtype] for each in bucket.gradients(self._slice)]
            update(gradients, self.num_steps, lr, factor)
        increment_version(self._sync.parameters)  # they were changed through other tensors
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
        """The ranks that told of something that is not finite; else those whose own gradients are seen not to be; else
        those in whose sums it shows."""
        told, shares = [numbers[1:] for numbers in rows], [numbers[:1] for numbers in rows]
        strays = self._from_all([math.inf if self._has_strange_strays() else 0.0])
        return _not_all_finite(told) or _not_all_finite(strays) or _not_all_finite(shares)

    def _has_strange_strays(self) -> bool:
        strays = [each for bucket in self._sync.buckets for each in bucket.strays]
        return not all(bool(each.isfinite().all()) for each in strays)

    def _not_finite(self, norm: float, ranks: Sequence[int]) -> NonFiniteGradient:
        names = ", ".join(name_rank(rank, self._mesh.topology.coords(rank)) for rank in ranks)
        return NonFiniteGradient(
            f"the norm of the gradients is {norm}: those of {names} are not all finite. The weights are as they were "
            "before this step. Look at its samples, or lower optimizer.lr.",
            ranks=tuple(ranks),
        )

    @property
    def state_bytes(self) -> int:
        """Of all that is remembered."""
        kept = (update.state(index) for update in self._updates.values() for index in range(len(update.weights)))
        return sum(value.nbytes for values in kept for value in values.values())

    def state(self) -> list[StatePart]:
        """Everything remembered from step to step but their number, by parameter."""
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
