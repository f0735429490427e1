"""Batches of a worker's shares, loaded ahead as long as a step's share is as that of the step before."""

from __future__ import annotations

from dataclasses import dataclass

from parallel3d.config import RunConfig
from parallel3d.data import Batch, Batches, Dataset, Sampler
from runtime.gradient_server.client.protocol import Share


@dataclass(frozen=True)
class _ShareSampler(Sampler):
    """The samples from `start` to `end` of each step's."""

    start: int = 0
    end: int = 0

    def indices(self, step: int) -> list[int]:
        return super().indices(step)[self.start : self.end]


class ShareBatches:
    """Of one run. A step's samples are those of one process; a share is a contiguous part of them."""

    def __init__(self, dataset: Dataset, config: RunConfig) -> None:
        self._dataset, self._config = dataset, config
        self._batches: Batches | None = None
        self._next = -1, -1, -1
        """Step, start and end of the share that is loaded ahead."""

    async def of(self, share: Share) -> Batch:
        """The share's samples."""
        if self._batches is None or self._next != (share.step, share.start, share.end):
            await self.aclose()
            self._batches = self._begin(share)
        batch = await anext(self._batches)
        self._next = share.step + 1, share.start, share.end
        return batch

    def _begin(self, share: Share) -> Batches:
        config = self._config
        sampler = _ShareSampler(
            len(self._dataset),
            config.batch_size,
            seed=config.train.seed,
            shuffle=config.data.shuffle,
            start=share.start,
            end=share.end,
        )
        return Batches(
            self._dataset,
            sampler,
            first=share.step,
            stop=config.train.steps,
            prefetch=config.data.prefetch,
            timeout=config.comm.timeout,
        )

    async def aclose(self) -> None:
        """Load no more."""
        if self._batches is not None:
            await self._batches.aclose()
            self._batches = None
