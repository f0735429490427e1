"""A rank's share of the norm is exact to the precision of its gradients, however long they are."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from parallel3d.gradients.buckets import Bucket, FlatBucket, LooseBucket
from parallel3d.optim.clip import SquaredNorm


def new(numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(numel, dtype=dtype)


def bucket_of(parameters: list[nn.Parameter], num_slices: int | None) -> Bucket:
    """With random gradients; None: loose."""
    torch.manual_seed(4)
    gradients = [torch.randn(each.shape).to(each.dtype) for each in parameters]
    bucket = LooseBucket(0, parameters) if num_slices is None else FlatBucket(0, parameters, num_slices, new, new)
    for each, gradient in zip(parameters, gradients, strict=True):
        each.grad = gradient
    bucket.copy_into_bucket()
    return bucket


def _is_in(those: set[int], parameter: nn.Parameter) -> bool:
    return id(parameter) in those


@pytest.mark.parametrize("num_slices", [None, 1, 2, 3])
@pytest.mark.parametrize(
    ("dtype", "precision"), [(torch.float64, 1e-12), (torch.float32, 3e-6), (torch.bfloat16, 3e-6)], ids=str
)
def test_slices_add_up(dtype, precision, num_slices):
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in [(3, 7), (1001, 301), (5,), (0,), (9000,)]]
    bucket = bucket_of(parameters, num_slices)
    for left_out in (set(), {0}, {1}, {2, 4}, {0, 1, 2, 3, 4}):
        counted = {id(each) for number, each in enumerate(parameters) if number not in left_out}
        counts = partial(_is_in, counted)
        parts = [SquaredNorm([bucket], index, counts)() for index in range(num_slices or 1)]
        expected = sum(float(each.grad.double().square().sum()) for each in parameters if id(each) in counted)
        assert sum(parts) == pytest.approx(expected, rel=precision)


def test_millions_of_elements_lose_no_digits():
    parameter = nn.Parameter(torch.zeros(1 << 22))
    bucket = bucket_of([parameter], 1)
    parameter.grad.fill_(0.1)
    expected = float(parameter.grad[0].double()) ** 2 * (1 << 22)
    assert SquaredNorm([bucket], 0, lambda _: True)() == pytest.approx(expected, rel=3e-6)
    assert float(torch.linalg.vector_norm(parameter.grad)) ** 2 != pytest.approx(expected, rel=3e-5)
