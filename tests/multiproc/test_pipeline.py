"""Every schedule on real ranks gives the loss, the gradients and the activations of the plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.processes import Launched

pytestmark = pytest.mark.slow
RANK = str(Path(__file__).with_name("ranks") / "pipeline_rank.py")
APART = {"APART": "1", "GLOO_SOCKET_IFNAME": "lo"}


@pytest.mark.parametrize(
    ("size", "variables"),
    [
        pytest.param(2, {}, marks=pytest.mark.exhaustive),
        (4, {}),
        pytest.param(8, {}, marks=pytest.mark.exhaustive),
        pytest.param(2, APART, marks=pytest.mark.exhaustive),
    ],
    ids=["2", "4", "8", "apart"],
)
def test_every_schedule_gives_what_one_process_does(size, variables):
    with Launched("-n", str(size), RANK, preload=None, **variables) as launched:
        assert (launched.finish(seconds=120), launched.stdout.text, launched.stderr.text) == (0, "", "")
