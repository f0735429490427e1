"""Adding gradients in float64 and dividing the sums, in blocks that fit the cache. Elements are as on the wire."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy

from runtime.gradient_server.wire.messages import Dtype

Array: TypeAlias = numpy.ndarray[Any, numpy.dtype[Any]]

_AT_ONCE = 32_768  # elements: 256 KiB as float64, which fits a core's own cache
_CAST_AT_ONCE = 1024  # elements: with numpy's default, 8192, a sum of mixed dtypes takes 1.5 times as long
_INFINITY = {Dtype.FLOAT16: 0x7C00, Dtype.BFLOAT16: 0x7F80}
"""Infinity of 16-bit floats, as bits: without the sign bit only NaNs are larger."""


class Arithmetic:
    """The scratch buffers of sums. Allocating them for every piece would take longer than the arithmetic, because the
    system clears new pages."""

    def __init__(self) -> None:
        self._scratch = numpy.empty(_AT_ONCE)
        self._bits = numpy.empty(_AT_ONCE, numpy.uint16)

    def is_finite(self, values: Array, dtype: Dtype) -> bool:
        """Whether no value is NaN or infinite."""
        for part in _parts(len(values)):
            if dtype in _INFINITY:
                bits = values[part].view(numpy.uint16)
                if numpy.bitwise_and(bits, 0x7FFF, out=self._bits[: len(bits)]).max() >= _INFINITY[dtype]:
                    return False
            else:  # NaN wins both maximum and minimum
                extremes = numpy.maximum.reduce(values[part]), numpy.minimum.reduce(values[part])
                if not all(map(math.isfinite, extremes)):
                    return False
        return True

    def assign(self, sums: Array, values: Array, weight: int, dtype: Dtype) -> None:
        """sums = values x weight; the previous content is ignored."""
        if weight == 1 and dtype is not Dtype.BFLOAT16:
            sums[:] = values
            return
        for part in _parts(len(values)):
            sums[part] = self._weighted(values[part], weight, dtype)

    def add(self, sums: Array, values: Array, weight: int, dtype: Dtype) -> None:
        """sums += values x weight."""
        if weight == 1 and dtype is not Dtype.BFLOAT16:
            before = numpy.setbufsize(_CAST_AT_ONCE)
            try:
                numpy.add(sums, values, out=sums)
            finally:
                numpy.setbufsize(before)
            return
        for part in _parts(len(values)):
            sums[part] += self._weighted(values[part], weight, dtype)

    def finish(self, result: Array, sums: Array | None, values: Array, weight: int, total: int, dtype: Dtype) -> None:
        """result = (sums + values x weight) / total; `sums` is not changed. None: there are no other values."""
        for part in _parts(len(values)):
            scratch = self._weighted(values[part], weight, dtype)
            if sums is not None:
                scratch += sums[part]
            self._divide(result[part], scratch, total, dtype)

    def average(self, result: Array, sums: Array, total: int, dtype: Dtype) -> None:
        """result = sums / total."""
        for part in _parts(len(sums)):
            self._divide(result[part], sums[part], total, dtype)

    def _weighted(self, values: Array, weight: int, dtype: Dtype) -> Array:
        scratch = self._scratch[: len(values)]
        scratch[:] = _from_bfloat16(values) if dtype is Dtype.BFLOAT16 else values
        if weight != 1:
            scratch *= weight
        return scratch

    def _divide(self, result: Array, sums: Array, total: int, dtype: Dtype) -> None:
        scratch = self._scratch[: len(sums)]
        if total & (total - 1) == 0:  # a product then gives the same bits in half the time
            numpy.multiply(sums, 1 / total, out=scratch)
        else:
            numpy.divide(sums, total, out=scratch)
        result[:] = _to_bfloat16(scratch) if dtype is Dtype.BFLOAT16 else scratch


def _parts(count: int) -> list[slice]:
    return [slice(begin, begin + _AT_ONCE) for begin in range(0, count, _AT_ONCE)]


def _from_bfloat16(values: Array) -> Array:
    """A bfloat16 is the upper half of a float32."""
    return (values.astype(numpy.uint32) << 16).view(numpy.float32)


def _to_bfloat16(values: Array) -> Array:
    """Round to nearest, ties to even."""
    bits = values.astype(numpy.float32).view(numpy.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(numpy.uint16)
