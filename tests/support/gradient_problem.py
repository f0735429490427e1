"""Training that shows every sample too many or too few: plain numpy, and any number of workers get the same weights."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy

from runtime.gradient_server.client.raw_parts import RawPart
from runtime.gradient_server.wire.messages import Dtype

Array: TypeAlias = numpy.ndarray[Any, numpy.dtype[Any]]

RATE, MOMENTUM = 0.3, 0.5
CLOSE = 1e-6
"""How near all weights have to be to one process's."""
_DTYPES = {"float64": Dtype.FLOAT64, "float32": Dtype.FLOAT32}


class Size(NamedTuple):
    """Of the gradient, in elements."""

    num_float64: int = 40_000
    num_float32: int = 20_000


USUAL = Size()


class Weights:
    """Of one worker: two tensors of different precision, and their momenta.

    Sample i of step s pulls the weights w towards u cos p + v sin p, as strongly as a: its gradient is
    a (w - u cos p - v sin p), where a and p belong to (s, i) alone.
    """

    def __init__(self, name: str, size: Size = USUAL) -> None:
        """Every name begins elsewhere, so that it shows whose weights a run began with."""
        random = numpy.random.default_rng(zlib.crc32(name.encode()))
        shapes = {"float64": size.num_float64, "float32": size.num_float32}
        self.values = [random.uniform(-1, 1, count).astype(dtype) for dtype, count in shapes.items()]
        self.momenta = [numpy.zeros_like(each) for each in self.values]
        self.averages = [numpy.zeros_like(each) for each in self.values]
        """Where a step's average is written."""
        self._directions = [_directions(each) for each in self.values]

    def gradient(self, step: int, start: int, end: int) -> list[Array]:
        """The mean over these samples."""
        strength, along_u, along_v = numpy.mean([_sample(step, index) for index in range(start, end)], axis=0)
        return [
            (strength * each - along_u * u - along_v * v).astype(each.dtype)
            for each, (u, v) in zip(self.values, self._directions, strict=True)
        ]

    def apply(self, gradient: Sequence[Array]) -> None:
        """One step of descent with momentum."""
        for value, momentum, each in zip(self.values, self.momenta, gradient, strict=True):
            momentum *= MOMENTUM
            momentum += each
            value -= (RATE * momentum).astype(value.dtype)

    def probe(self) -> list[float]:
        """Some elements of all that is kept from step to step."""
        return [float(x) for each in (*self.values, *self.momenta) for x in each[:: max(1, len(each) // 16)]]

    # What GradientClient asks of a keeper of states.

    def save(self) -> list[RawPart]:
        return raw([*self.values, *self.momenta])

    def load(self, step: int, parts: Sequence[RawPart]) -> None:
        for mine, part in zip((*self.values, *self.momenta), parts, strict=True):
            mine[:] = numpy.frombuffer(part.data, mine.dtype)


def raw(arrays: Sequence[Array]) -> list[RawPart]:
    """These arrays' own memory."""
    return [RawPart(_DTYPES[each.dtype.name], memoryview(each).cast("B")) for each in arrays]


def sample_loss(step: int, start: int, end: int) -> float:
    """A mean that depends on each of the samples, and on nothing else."""
    return float(numpy.mean([_sample(step, index)[0] for index in range(start, end)]))


def _directions(like: Array) -> tuple[Array, Array]:
    angles = numpy.arange(len(like)) * 0.37
    return numpy.cos(angles).astype(like.dtype), numpy.sin(angles).astype(like.dtype)


def _sample(step: int, index: int) -> tuple[float, float, float]:
    """a, a cos p, a sin p."""
    random = numpy.random.default_rng((step, index))
    strength, angle = random.uniform(0.5, 1.5), random.uniform(0, 2 * numpy.pi)
    return strength, strength * numpy.cos(angle), strength * numpy.sin(angle)


def alone(name: str, num_samples: int, size: Size = USUAL) -> Iterator[Weights]:
    """One process that computes all samples of every step: its weights before each."""
    weights = Weights(name, size)
    step = 0
    while True:
        yield weights
        weights.apply(weights.gradient(step, 0, num_samples))
        step += 1
