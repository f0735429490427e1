"""Reductions of several ranks' values: the same bits as adding up one after the other, and one rounding."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from process_groups.reduction import PIECE, Reducer, part, piece_bytes, pieces

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int32, torch.int64, torch.int8, torch.uint8)
HALVES = (torch.bfloat16, torch.float16)
CASES = [
    (dtype, op)
    for dtype in FLOATS + INTEGERS
    for op in ("sum", "mean", "min", "max")
    if op != "mean" or dtype.is_floating_point
]


def inputs_of(num: int, dtype: torch.dtype, numel: int = 1001) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(num)
    if dtype.is_floating_point:
        return [torch.randn(numel, generator=generator).mul_(10).to(dtype) for _ in range(num)]
    return [torch.randint(0, 100, (numel,), generator=generator).to(dtype) for _ in range(num)]


def one_after_the_other(inputs: list[torch.Tensor], op: str) -> torch.Tensor:
    """What users would write; 16-bit sums in float32."""
    dtype = inputs[0].dtype
    wide = torch.float32 if dtype in HALVES else dtype
    total = inputs[0].to(wide)
    for values in inputs[1:]:
        match op:
            case "min":
                total = torch.minimum(total, values.to(wide))
            case "max":
                total = torch.maximum(total, values.to(wide))
            case _:
                total = total + values.to(wide)
    return (total / len(inputs) if op == "mean" else total).to(dtype)


@pytest.mark.parametrize("num", range(2, 9))
@pytest.mark.parametrize(("dtype", "op"), CASES)
def test_the_same_bits_as_one_after_the_other(dtype, op, num):
    inputs = inputs_of(num, dtype)
    copies = [values.clone() for values in inputs]
    out = torch.empty(1001, dtype=dtype)
    Reducer()(out, inputs, op)
    assert torch.equal(out, one_after_the_other(copies, op))
    assert all(torch.equal(values, copy) for values, copy in zip(inputs, copies, strict=True))


@pytest.mark.parametrize("num", [2, 3, 5])
@pytest.mark.parametrize(("dtype", "op"), CASES)
def test_the_result_may_take_the_place_of_any_input(dtype, op, num):
    reduce = Reducer()
    for place in range(num):
        inputs = inputs_of(num, dtype)
        expected = one_after_the_other([values.clone() for values in inputs], op)
        reduce(inputs[place], inputs, op)
        assert torch.equal(inputs[place], expected), place


@pytest.mark.parametrize("op", ["sum", "mean", "min", "max"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_whole_piece_fits(dtype, op):
    inputs = inputs_of(3, dtype, numel=PIECE // dtype.itemsize)
    out = torch.empty_like(inputs[0])
    Reducer()(out, inputs, op)
    assert torch.equal(out, one_after_the_other(inputs, op))


@pytest.mark.parametrize("num", [2, 3, 8])
def test_sums_of_16_bits_are_rounded_once(num):
    # Steps of bfloat16 at 256 are 2: one added after the other would be lost each time.
    inputs = [torch.full((3,), 256.0 if number == 0 else 1.0).bfloat16() for number in range(num)]
    out = torch.empty(3, dtype=torch.bfloat16)
    Reducer()(out, inputs, "sum")
    assert torch.equal(out, torch.full((3,), 255.0 + num).bfloat16())
    assert num < 4 or out[0] > 256


@pytest.mark.parametrize("num", [2, 3, 8])
def test_a_mean_does_not_overflow_on_its_way(num):
    inputs = [torch.full((3,), 60_000.0).half() for _ in range(num)]
    out = torch.empty(3, dtype=torch.float16)
    Reducer()(out, inputs, "mean")
    assert out.tolist() == [60_000.0] * 3


@pytest.mark.parametrize("op", ["min", "max", "sum"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_no_value_is_hidden_by_others(op, place):
    inputs = [torch.ones(2) for _ in range(3)]
    inputs[place][0] = float("nan")
    out = torch.empty(2)
    Reducer()(out, inputs, op)
    assert out.isnan().tolist() == [True, False]


def test_pieces_cover_everything_once():
    for itemsize, num_tensors in product((1, 2, 4, 8), (2, 3, 8)):
        for start, stop in ((0, 0), (0, 1), (5, PIECE), (7, 3 * PIECE + 1)):
            found = pieces(start, stop, itemsize, num_tensors)
            assert [a for a, _ in found[1:]] == [b for _, b in found[:-1]]
            assert all(0 < b - a <= piece_bytes(num_tensors) // itemsize for a, b in found)
            assert (found[0][0], found[-1][1]) == (start, stop) if found else start == stop


def test_parts_cover_everything_once():
    for num in (1, 2, 3, 7):
        for numel in (0, 1, 2, 6, 7, 1000):
            found = [part(numel, index, num) for index in range(num)]
            assert [a for a, _ in found] == [0, *(b for _, b in found[:-1])]
            assert found[-1][1] == numel
            assert max(b - a for a, b in found) - min(b - a for a, b in found) <= 1
