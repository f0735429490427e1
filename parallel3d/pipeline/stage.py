"""One stage of a pipeline: its module, and what its microbatches keep from forward to backward."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from parallel3d.gradients.deferred import Gatherer, Job, collecting, split_weight_gradients
from runtime.errors import InvalidCall

_SHORT = 0.25  # of a forward: how long a weight's gradient may take that is computed while a message is awaited
Loss = Callable[[Any, Any], torch.Tensor]
"""From the last stage's output and a microbatch's target to a scalar."""


@dataclass(slots=True)
class _Kept:
    """What a microbatch keeps: `inputs` and `outputs` until its backward, `jobs` until its weight part."""

    inputs: Sequence[torch.Tensor]
    """Those that need a gradient."""
    outputs: Sequence[torch.Tensor] = ()
    jobs: deque[Job] = field(default_factory=deque)
    num_jobs_done: int = 0


class Stage:
    """A part of the model. Its output, a tensor or a tuple of tensors, is the next stage's arguments; tensors that need
    no gradient get none."""

    def __init__(self, index: int, num_stages: int, module: nn.Module, *, splits_backward: bool = False) -> None:
        self.index, self.module = index, module
        self.is_first, self.is_last = index == 0, index == num_stages - 1
        self._kept: dict[int, _Kept] = {}
        self.peak_activations = 0
        """The most microbatches whose activations were kept at a time since `begin`."""
        self._forward_seconds = 0.0
        self._job_seconds: dict[int, float] = {}
        """How long the n-th job of a microbatch took last time."""
        self._gatherer = Gatherer()
        self._mergeable: Collection[int] = ()
        self._overwrites = any(getattr(each, "inplace", False) for each in module.modules())
        """Whether a module may write over its input, which autograd forbids for a leaf."""
        if splits_backward:
            split_weight_gradients(module)

    def begin(self, mergeable: Collection[int] = ()) -> None:
        """A new step. Small weight gradients of `mergeable` microbatches may be added together with those of later
        ones."""
        self._mergeable = mergeable
        self._gatherer.forget()
        self._kept.clear()
        self.peak_activations = 0

    def forward(self, microbatch: int, inputs: Sequence[torch.Tensor]) -> Any:
        """The module's output."""
        needing = [] if self.is_first else [each for each in inputs if each.requires_grad]
        kept = self._kept[microbatch] = _Kept(needing)
        self.peak_activations = max(self.peak_activations, len(self._kept))
        start = time.perf_counter()
        output = self.module(*(map(_own_copy, inputs) if self._overwrites else inputs))
        self._forward_seconds = time.perf_counter() - start
        kept.outputs = self._tensors(output)
        return output

    def _tensors(self, output: Any) -> Sequence[torch.Tensor]:
        outputs = output if isinstance(output, tuple | list) else (output,)
        for each in outputs:
            if not isinstance(each, torch.Tensor):
                raise InvalidCall(
                    f"stage {self.index} gives {type(each).__name__}; a stage gives a tensor or a tuple of tensors."
                )
        return outputs

    def set_loss(self, microbatch: int, loss: torch.Tensor) -> None:
        """Let the last stage's backward begin with this loss."""
        self._kept[microbatch].outputs = (loss,)

    def loss_gradients(self, microbatch: int, weight: float) -> list[torch.Tensor | None]:
        """The gradients that the last stage's backward begins with."""
        return [torch.full_like(each, weight) for each in self._kept[microbatch].outputs if each.requires_grad]

    def outputs(self, microbatch: int) -> list[torch.Tensor]:
        """The next stage's inputs: detached, with the same `requires_grad`."""
        return [each.detach().requires_grad_(each.requires_grad) for each in self._kept[microbatch].outputs]

    def outputs_to_copy(self, microbatch: int) -> Sequence[torch.Tensor]:
        """The same for a caller that copies them: not detached."""
        return self._kept[microbatch].outputs

    def backward(self, microbatch: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """The whole backward. `gradients` are those of the outputs that need one."""
        with self._gathering(microbatch):
            _backward(self._kept[microbatch], gradients)
        self._end_gathering(microbatch)

    def input_backward(self, microbatch: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """The part that the stage before waits for; the rest is left for `weight_backward`."""
        kept = self._kept[microbatch]
        with collecting(kept.jobs):
            _backward(kept, gradients)

    def weight_backward(self, microbatch: int) -> None:
        """The rest of the backward; releases the microbatch."""
        kept = self._kept[microbatch]
        with self._gathering(microbatch):
            while kept.jobs:
                self._do_one(kept)
        self._end_gathering(microbatch)
        del self._kept[microbatch]

    def work_off_one(self, microbatch: int) -> bool:
        """Compute one weight's gradient while a message is awaited. False if none is left, or if the next one would
        take long: the message may arrive meanwhile."""
        kept = self._kept[microbatch]
        if not kept.jobs or self._job_seconds.get(kept.num_jobs_done, math.inf) > _SHORT * self._forward_seconds:
            return False
        with self._gathering(microbatch):
            self._do_one(kept)
        return True

    def _gathering(self, microbatch: int) -> AbstractContextManager[None]:
        return self._gatherer.gathering(holds=microbatch in self._mergeable)

    def _end_gathering(self, microbatch: int) -> None:
        if microbatch not in self._mergeable:
            self._gatherer.add_all()

    def has_worked_off(self, microbatch: int) -> bool:
        """Whether a part of its weight backward is done."""
        return self._kept[microbatch].num_jobs_done > 0

    def _do_one(self, kept: _Kept) -> None:
        start = time.perf_counter()
        with torch.no_grad():  # or the gradient would keep the graph that made it alive
            kept.jobs.popleft()()
        self._job_seconds[kept.num_jobs_done] = time.perf_counter() - start
        kept.num_jobs_done += 1

    def input_gradients(self, microbatch: int) -> list[torch.Tensor | None]:
        """Of the inputs that need one; None for an input that was not used."""
        return [each.grad for each in self._kept[microbatch].inputs]

    def release(self, microbatch: int) -> None:
        """Keep nothing of it any more."""
        del self._kept[microbatch]


def _backward(kept: _Kept, gradients: Sequence[torch.Tensor | None]) -> None:
    needing = [each for each in kept.outputs if each.requires_grad]
    kept.outputs = ()
    pairs = [pair for pair in zip(needing, gradients, strict=True) if pair[1] is not None]
    if pairs:
        torch.autograd.backward([each for each, _ in pairs], [gradient for _, gradient in pairs])


def _own_copy(given: torch.Tensor) -> torch.Tensor:
    """Memory that may be written over; its gradient flows back to `given`."""
    return given.clone() if given.requires_grad else given
