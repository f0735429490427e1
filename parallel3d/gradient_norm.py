"""The sum of squares of a rank's share of the gradients: its slice of every bucket, as far as this rank counts it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from parallel3d.gradient_buckets import Bucket

_ROW = 8192  # elements that are added up in their own precision; the rows' sums are added up in float64


class SquaredNorm:
    """Calling it, in the engine thread, gives the sum. Every replica takes the slice that it would have if gradients
    were sharded: they need not do the same work twice, and the sum has the same bits either way."""

    def __init__(self, buckets: Sequence[Bucket], index: int, counts: Callable[[nn.Parameter], bool]) -> None:
        self._tables: list[torch.Tensor] = []
        self._rests: list[torch.Tensor] = []
        for bucket in buckets:
            for start, stop in _counted(bucket, bucket.bounds(index), counts):
                middle = stop - (stop - start) % _ROW
                if start < middle:
                    self._tables.append(bucket.gradients[start:middle].view(-1, _ROW))
                if middle < stop:
                    self._rests.append(bucket.gradients[middle:stop])

    @torch.no_grad()
    def __call__(self) -> float:
        norms = [torch.linalg.vector_norm(each, dim=1, dtype=_wide(each)).double() for each in self._tables]
        if self._rests:
            rests = [each.to(_wide(each)) for each in self._rests]
            norms.append(torch.stack([each.double() for each in torch._foreach_norm(rests)]))
        if not norms:
            return 0.0
        joined = torch.cat(norms)
        return float(torch.dot(joined, joined))


def _wide(values: torch.Tensor) -> torch.dtype:
    return torch.promote_types(values.dtype, torch.float32)


def _counted(
    bucket: Bucket, bounds: tuple[int, int], counts: Callable[[nn.Parameter], bool]
) -> Iterator[tuple[int, int]]:
    """The ranges of a slice that are counted; neighbours, between which there is nothing, are one."""
    start: int | None = None
    end = 0
    for place in bucket.places:
        if counts(place.parameter):
            start, end = place.start if start is None else start, place.stop
        elif start is not None:
            yield from _cut(start, end, bounds)
            start = None
    if start is not None:
        yield from _cut(start, end, bounds)


def _cut(start: int, stop: int, bounds: tuple[int, int]) -> Iterator[tuple[int, int]]:
    start, stop = max(start, bounds[0]), min(stop, bounds[1])
    if start < stop:
        yield start, stop
