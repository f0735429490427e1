"""The optimizer step over the whole mesh: norm, clip, update, and the replicas' slices put together again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.autograd.graph import increment_version

from parallel3d.config.models import Optimizer as OptimizerConfig
from parallel3d.fused_updates import Update, update_of
from parallel3d.gradient_buckets import Bucket, Counts, FlatBucket
from parallel3d.gradient_norm import SquaredNorm
from parallel3d.gradient_sync import GradientSync, farewell
from parallel3d.rank_mesh import Mesh
from runtime.errors import NonFiniteGradient, name_rank

_TINY = 1e-6  # as in torch.nn.utils.clip_grad_norm_, so that clipped gradients are the same


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
        self.num_steps = 0
        """Steps taken. Set it where the state of an earlier run is put in."""
        self._shares = mesh.world.empty(mesh.world_size, dtype=torch.float64)

    async def step(self, lr: float, scale: float = 1.0) -> float:
        """Once gradients are summed up: update the weights. Gives the norm of all gradients of the mesh, before it was
        clipped, which is the same on every rank.

        scale: what gradients are multiplied with before all else.

        Raises NonFiniteGradient on every rank, and leaves the weights as they are, where that norm is not finite. If it
        is cancelled, or fails otherwise, the mesh's groups are closed.
        """
        if self._mesh.world_size == 1:
            return await self._mesh.compute(self._alone, lr, scale)
        try:
            return await self._with_others(lr, scale)
        except NonFiniteGradient:
            raise
        except BaseException as error:  # some ranks' weights are new, and others' are not
            self._mesh.abort(farewell(self._mesh, error))
            raise

    async def _with_others(self, lr: float, scale: float) -> float:
        shares = await self._from_all(await self._mesh.compute(self._norm))
        norm = scale * math.sqrt(sum(shares))
        if not math.isfinite(norm):
            raise self._not_finite(norm, await self._culprits(shares))
        await self._mesh.compute(self._update, lr, norm, scale)
        if self._sync.is_sharded:
            await self._gather()
        return norm

    def _alone(self, lr: float, scale: float) -> float:
        norm = scale * math.sqrt(self._norm())
        if not math.isfinite(norm):
            raise self._not_finite(norm, [self._mesh.rank])
        self._update(lr, norm, scale)
        return norm

    async def _from_all(self, share: float) -> list[float]:
        """Every rank's number. A sum in which all others are zero rounds nothing."""
        self._shares.zero_()[self._mesh.rank] = share
        await self._mesh.world.all_reduce(self._shares, strategy="default")
        return self._shares.tolist()

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

    async def _culprits(self, shares: Sequence[float]) -> list[int]:
        """The ranks whose own gradients are not finite, where they can be told; else those in whose sums it shows."""
        own = await self._from_all(float(await self._mesh.compute(self._has_strange_strays)))
        return [rank for rank, found in enumerate(own) if found] or [
            rank for rank, share in enumerate(shares) if not math.isfinite(share)
        ]

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
