"""A mesh of real ranks trains as one process does: the same losses, the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.processes import Launched

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
RANK = str(Path(__file__).with_name("ranks") / "training_rank.py")


def train(size: int, what: str) -> None:
    with Launched("-n", str(size), RANK, preload=None, WHAT=what) as launched:
        assert (launched.finish(seconds=280), launched.stdout.text, launched.stderr.text) == (0, "", "")


@pytest.mark.parametrize(
    ("size", "precision"),
    [
        (4, "float64"),
        *(pytest.param(size, "float64", marks=pytest.mark.exhaustive) for size in (1, 2, 3, 5, 6, 7, 8)),
        *(pytest.param(size, "float32", marks=pytest.mark.exhaustive) for size in range(1, 9)),
    ],
)
def test_every_mesh_gives_what_one_process_does(size, precision):
    train(size, precision)


@pytest.mark.exhaustive
def test_a_users_own_model_and_one_of_hugging_face_give_what_one_process_does():
    train(4, "other models")
