"""Readiness of a bucket: whether all its gradients are complete before its stage's last backward has ended.

The first step counts how often that backward adds to each parameter's gradient, and starts no bucket early. From then
on a bucket is ready as soon as all its parameters were added to that often.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from parallel3d.gradients.deferred import on_autograd_grad
from parallel3d.torch_internals import post_accumulate_grad_hooks, version_of
from runtime.errors import InvalidCall


class Readiness:
    """Counts the additions to one bucket's gradients, by the parameters' `on_gradient`. Lives in the engine thread."""

    def __init__(self, stage: int, parameters: Sequence[nn.Parameter], ready: Callable[[], None]) -> None:
        self.stage, self.ready = stage, ready
        self.has_started = self.is_open = False
        """Whether the bucket is being reduced; whether the stage's last backward runs."""
        self.has_learned = False
        self.is_reliable = True
        """False once a gradient changed without a call of `on_gradient`: the bucket is then never ready early."""
        self.num_missing = 0
        self._watches = [_Watch(self, parameter) for parameter in parameters]

    def begin(self) -> None:
        """Begin a new step."""
        self.has_started = self.is_open = False

    def open(self, *, split: bool) -> None:
        """The stage's last backward begins. split: only its weight part is left, in which autograd adds nothing."""
        self.is_open = True
        for watch in self._watches:
            watch.open(split)
        self.num_missing = sum(not watch.is_complete for watch in self._watches)
        self._check()

    def one_less(self) -> None:
        """One more parameter is complete."""
        self.num_missing -= 1
        self._check()

    def _check(self) -> None:
        if self.num_missing == 0 and self.has_learned and self.is_reliable:
            self.ready()

    def close(self) -> None:
        """The last backward has ended."""
        self.is_open = False
        for watch in self._watches:
            self.is_reliable = self.is_reliable and not watch.is_unsure
            watch.learn()
        self.has_learned = True


class _Watch:
    """Counts the additions to one parameter's gradient."""

    def __init__(self, bucket: Readiness, parameter: nn.Parameter) -> None:
        self._bucket, self._parameter = bucket, parameter
        self._expected = self._num = 0
        """Additions in a step's last backward: those expected, and those so far."""
        self._by_hand = self._is_odd = False
        self._seen: tuple[torch.Tensor | None, int] = None, 0
        self.is_complete = False
        parameter.on_gradient = self._added  # type: ignore[attr-defined]
        hooks = post_accumulate_grad_hooks(parameter)
        if not hooks or on_autograd_grad not in hooks.values():
            parameter.register_post_accumulate_grad_hook(on_autograd_grad)  # type: ignore[no-untyped-call]

    def open(self, split: bool) -> None:
        self._num = 0
        self._seen = self._now()
        self.is_complete = split and not self._by_hand and self._parameter.grad is not None

    def _added(self, by_hand: bool) -> None:
        bucket = self._bucket
        if by_hand:
            self._by_hand = True
        elif self._parameter.grad is None:  # autograd called the hook, but something else adds the gradient later
            self._is_odd = True
        if bucket.has_started:
            raise InvalidCall(self._too_often())
        if not bucket.is_open:
            return
        self._num += 1
        if not bucket.has_learned:
            self._seen = self._now()
        elif self._num == self._expected and not self.is_complete:
            self.is_complete = True
            bucket.one_less()

    def _now(self) -> tuple[torch.Tensor | None, int]:
        gradient = self._parameter.grad
        return gradient, 0 if gradient is None else version_of(gradient)

    @property
    def is_unsure(self) -> bool:
        """Whether the gradient changes without a call of `on_gradient`."""
        if self._bucket.has_learned:
            return self._is_odd
        (seen, version), (gradient, now) = self._seen, self._now()
        return self._is_odd or seen is not gradient or version != now

    def learn(self) -> None:
        self._expected = max(self._expected, self._num)
        self._seen = None, 0

    def _too_often(self) -> str:
        shape = tuple(self._parameter.shape)
        return (
            f"stage {self._bucket.stage}: a parameter {shape} is added to {self._num + 1} times in the step's last "
            f"backward, but {self._expected} times in those before, and its bucket is already being reduced. Have the "
            "model use it equally often in every step."
        )
