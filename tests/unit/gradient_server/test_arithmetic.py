"""Sums of gradients, element by element: what is finite, and that none is lost where pieces are cut."""

from __future__ import annotations

import numpy
import pytest

from runtime.gradient_server.arithmetic import Arithmetic, Array
from runtime.gradient_server.wire.messages import Dtype

COUNT = 70_000
"""More than are looked at in one go, and no multiple of it."""
NOT_FINITE = {
    Dtype.FLOAT16: (numpy.uint16, (0x7C00, 0xFC00, 0x7C01, 0xFE00)),
    Dtype.BFLOAT16: (numpy.uint16, (0x7F80, 0xFF80, 0x7F81, 0xFFC0)),
    Dtype.FLOAT32: (numpy.uint32, (0x7F800000, 0xFF800000, 0x7F800001, 0xFFC00000)),
    Dtype.FLOAT64: (numpy.uint64, (0x7FF0 << 48, 0xFFF0 << 48, (0x7FF0 << 48) + 1, 0xFFF8 << 48)),
}
"""As bits: both infinities, a signalling and a quiet NaN."""
DTYPES = pytest.mark.parametrize("dtype", NOT_FINITE)


def bits_of(values: Array) -> Array:
    return values.view(f"<u{values.itemsize}")


@DTYPES
@pytest.mark.parametrize("place", [0, 40_000, COUNT - 1])
def test_what_is_not_finite_is_found_wherever_it_is(dtype: Dtype, place: int) -> None:
    kind, patterns = NOT_FINITE[dtype]
    for pattern in patterns:
        values = numpy.zeros(COUNT, kind)
        values[place] = pattern
        assert not Arithmetic().is_finite(values.view(dtype.numpy), dtype), hex(pattern)


@DTYPES
def test_the_largest_and_the_smallest_numbers_are_finite(dtype: Dtype) -> None:
    kind, (infinity, minus_infinity, *_) = NOT_FINITE[dtype]
    values = numpy.array([infinity - 1, minus_infinity - 1, 1, 0], kind).view(dtype.numpy)
    assert Arithmetic().is_finite(values, dtype)
    assert Arithmetic().is_finite(values[:0], dtype)


@pytest.mark.parametrize("total", [4, 3])
def test_sums_and_averages_are_those_of_float64(total: int) -> None:
    arithmetic, generator = Arithmetic(), numpy.random.default_rng(1)
    values = [generator.standard_normal(COUNT).astype(numpy.float32) for _ in range(3)]
    sums, result = numpy.empty(COUNT), numpy.empty(COUNT, numpy.float32)
    before = numpy.getbufsize()
    arithmetic.assign(sums, values[0], 1, Dtype.FLOAT32)
    arithmetic.add(sums, values[1], 1, Dtype.FLOAT32)
    arithmetic.finish(result, sums, values[2], total - 2, total, Dtype.FLOAT32)
    whole = values[0].astype(numpy.float64) + values[1]
    assert (sums == whole).all()
    expected = (values[2].astype(numpy.float64) * (total - 2) + whole) / total
    assert (bits_of(result) == bits_of(expected.astype(numpy.float32))).all()
    assert numpy.getbufsize() == before
