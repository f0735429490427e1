"""Sums over what is counted add up to the mean over the whole batch."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from parallel3d.models.losses import IGNORED, make_loss
from runtime.errors import InvalidCall


def test_cross_entropy_leaves_out_what_is_ignored():
    logits, targets = torch.randn(4, 3, 7), torch.randint(0, 7, (4, 3))
    targets[0, :2] = targets[2, 1] = IGNORED
    loss = make_loss("cross_entropy")
    total = sum(loss(logits[rows], targets[rows]) for rows in (slice(0, 1), slice(1, 4)))
    assert loss.count(targets) == 9
    torch.testing.assert_close(total / 9, functional.cross_entropy(logits.flatten(0, 1), targets.flatten()))


def test_cross_entropy_of_nothing_is_nothing():
    loss = make_loss("cross_entropy")
    assert loss(torch.randn(2, 3, 5), torch.full((2, 3), IGNORED)).item() == 0


def test_squared_error_is_a_mean_over_samples():
    output, target = torch.randn(6, 5, 2), torch.randn(6, 5, 2)
    loss = make_loss("mse")
    total = sum(loss(output[rows], target[rows]) for rows in (slice(0, 2), slice(2, 6)))
    torch.testing.assert_close(total / loss.count(target), functional.mse_loss(output, target))


def test_squared_error_does_not_broadcast():
    with pytest.raises(InvalidCall, match=r"the model gives \(4, 1\), but the target is \(4,\)"):
        make_loss("mse")(torch.zeros(4, 1), torch.zeros(4))


def mean_of_squares(output, target):
    return (output - target).square().mean()


def sum_and_count(output, target):
    kept = target >= 0
    return (output - target)[kept].square().sum(), kept.sum()


def plain(output, target):
    return 1.0


def detached(output, target):
    return (output - target).square().mean().detach()


def nothing_counts(output, target):
    return torch.tensor(0.0), 0


def per_sample(output, target):
    return (output - target).square()


@pytest.mark.parametrize("name", ["mean_of_squares", "sum_and_count"])
def test_a_function_of_the_users_own(name):
    output, target = torch.randn(6), torch.randn(6)
    target[0] = 1.0  # or by chance none would count
    loss = make_loss(f"{__name__}:{name}")
    assert loss.count(target) is None
    total = sum(loss(output[rows], target[rows]) for rows in (slice(0, 2), slice(2, 6)))
    whole = globals()[name](output, target)
    expected = whole[0] / whole[1] if isinstance(whole, tuple) else whole
    torch.testing.assert_close(total / loss.counted(), expected)
    assert loss.counted() == 0


def test_a_function_that_gives_no_single_number_is_named():
    with pytest.raises(InvalidCall, match=r"per_sample gives a tensor of \(6,\); a mean over the samples, or \(sum, c"):
        make_loss(f"{__name__}:per_sample")(torch.zeros(6), torch.zeros(6))
    with pytest.raises(InvalidCall, match=r"plain gives a float; .* mean and sum are tensors of a single number\.$"):
        make_loss(f"{__name__}:plain")(torch.zeros(6), torch.zeros(6))


def test_a_function_that_no_gradient_leads_back_from_is_named():
    output = torch.ones(6, requires_grad=True)
    with pytest.raises(InvalidCall, match=r"detached gives a tensor without a gradient"):
        make_loss(f"{__name__}:detached")(output, torch.zeros(6))
    with torch.no_grad():
        make_loss(f"{__name__}:detached")(output * 1, torch.zeros(6))  # evaluation
    assert make_loss(f"{__name__}:nothing_counts")(output, torch.zeros(6)) == 0


def test_targets_that_are_no_class_numbers_are_named():
    loss = make_loss("cross_entropy")
    with pytest.raises(
        InvalidCall, match=r"the model gives \(4, 3\), .* must be \(4,\) class numbers, but is \(4, 3\)"
    ):
        loss(torch.zeros(4, 3), torch.zeros(4, 3))
    assert loss(torch.zeros(8, 3), torch.zeros(2, 4, dtype=torch.int64)) > 0  # flattened by the model
