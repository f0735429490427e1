"""Parts of a gradient that are complete before backward has ended, noted by hooks on their parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch

from parallel3d.gradient_worker.parts import GradientPart
from runtime.errors import InvalidCall

Advance = Callable[[int], None]
"""Of the number of parts, from the first, that are kept."""


class EarlyParts:
    """Keeps each part, in the thread that runs backward, as soon as it and all before it are complete."""

    def __init__(self, parts: Sequence[GradientPart]) -> None:
        self._parts = parts
        self._advance: Advance | None = None
        self._missing: list[set[int]] = []
        """Of each part: parameters, by id, that have no gradient of this backward yet."""
        self._num_kept = 0
        for index, part in enumerate(parts):
            for parameter in part.tensors:
                parameter.register_post_accumulate_grad_hook(self._hook(index))  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def noting(self, advance: Advance) -> Iterator[None]:
        """Around one backward."""
        self._missing = [{id(each) for each in part.tensors} for part in self._parts]
        self._num_kept, self._advance = 0, advance
        try:
            yield
        finally:
            self._advance = None

    def take_num_kept(self) -> int:
        """Parts, from the first, that were kept by the last backward and not asked for since."""
        num_kept, self._num_kept = self._num_kept, 0
        return num_kept

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        def note(parameter: torch.Tensor) -> None:
            if self._advance is not None:
                self._note(index, parameter)

        return note

    def _note(self, index: int, parameter: torch.Tensor) -> None:
        if index < self._num_kept:
            raise InvalidCall(
                "overlap: a second backward adds to gradients that are sent already; put it around the last."
            )
        self._missing[index].discard(id(parameter))
        first = self._num_kept
        while self._num_kept < len(self._parts) and not self._missing[self._num_kept]:
            part = self._parts[self._num_kept]
            part.keep([each.grad for each in part.tensors])
            self._num_kept += 1
        if self._num_kept > first and self._advance is not None:
            self._advance(self._num_kept)
