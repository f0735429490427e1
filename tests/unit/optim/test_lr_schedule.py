"""The learning rate's shapes, step by step."""

from __future__ import annotations

import pytest

from parallel3d.config.sections import Optimizer
from parallel3d.optim.lr_schedule import learning_rate


def rates(steps: int, num: int | None = None, **keys) -> list[float]:
    config = Optimizer(lr=1.0, **keys)
    return [round(learning_rate(config, step, steps), 6) for step in range(num or steps)]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, [1, 1, 1, 1, 1]),
        ({"warmup_steps": 2}, [0.5, 1, 1, 1, 1]),
        ({"warmup_steps": 10}, [0.1, 0.2, 0.3, 0.4, 0.5]),
        ({"schedule": "cosine"}, [1, 0.853553, 0.5, 0.146447, 0]),
        ({"schedule": "cosine", "min_lr": 0.5}, [1, 0.926777, 0.75, 0.573223, 0.5]),
        ({"schedule": "cosine", "warmup_steps": 1}, [1, 0.853553, 0.5, 0.146447, 0]),
        ({"schedule": "cosine", "warmup_steps": 3}, [0.333333, 0.666667, 1, 0.5, 0]),
        ({"schedule": "cosine", "warmup_steps": 5}, [0.2, 0.4, 0.6, 0.8, 1]),
    ],
)
def test_shapes(keys, expected):
    assert rates(5, **keys) == expected


def test_after_the_last_step_it_stays():
    assert rates(3, 6, schedule="cosine", min_lr=0.25) == [1, 0.625, 0.25, 0.25, 0.25, 0.25]


def test_a_run_of_one_step():
    assert rates(1, schedule="cosine") == [1]
