"""Exchanges of tensors between real ranks, and the models that are cut over them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.processes import Launched

pytestmark = pytest.mark.slow
RANK = str(Path(__file__).with_name("ranks") / "tensor_rank.py")
GLOO = {"BACKEND": "gloo", "GLOO_SOCKET_IFNAME": "lo"}


@pytest.mark.parametrize(
    ("size", "variables"),
    [
        pytest.param(2, {}, marks=pytest.mark.exhaustive),
        (4, {}),
        pytest.param(2, GLOO, marks=pytest.mark.exhaustive),
        pytest.param(3, GLOO, marks=pytest.mark.exhaustive),
    ],
    ids=["2", "4", "gloo", "gloo 3"],
)
def test_ranks_give_what_one_process_does(size, variables):
    with Launched("-n", str(size), RANK, preload=None, **variables) as launched:
        assert (launched.finish(seconds=120), launched.stdout.text, launched.stderr.text) == (0, "", "")
