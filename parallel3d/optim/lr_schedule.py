"""The learning rate of every step: a warm-up, then constant or along half a cosine."""

from __future__ import annotations

import math

from parallel3d.config.sections import Optimizer


def learning_rate(config: Optimizer, step: int, steps: int) -> float:
    """The learning rate of a step, counted from 0, in a run of `steps` steps.

    The last step of the warm-up is the first with the full rate; without a warm-up that is step 0. The cosine begins
    there, ends at `min_lr` in the last step of the run, and stays there.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    peak, last = max(config.warmup_steps - 1, 0), steps - 1
    share = min((step - peak) / max(last - peak, 1), 1.0)
    return config.min_lr + (config.lr - config.min_lr) * (1 + math.cos(math.pi * share)) / 2
