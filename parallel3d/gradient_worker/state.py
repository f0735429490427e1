"""What workers of a gradient server have in common: a torch model, its optimizer and more, as raw parts and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from parallel3d.gradient_worker.parts import DTYPES, raw, raw_part
from parallel3d.gradient_worker.state_tree import flatten, unflatten
from runtime.errors import Mismatch
from runtime.gradient_server.client.raw_parts import RawPart
from runtime.gradient_server.wire.messages import Dtype

_TORCH = {of_wire: of_torch for of_torch, of_wire in DTYPES.items()}


class Stateful(Protocol):
    """A model, an optimizer, a learning-rate scheduler: torch's have these two."""

    def state_dict(self) -> Mapping[str, Any]:
        """Dicts and lists of tensors, numbers and text."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """What `state_dict` gave on another worker."""


class SyncedState:
    """A StateKeeper of these things, by name. Its first part is JSON, each other a tensor."""

    def __init__(self, things: Mapping[str, Stateful]) -> None:
        self._things = dict(things)

    def save(self) -> list[RawPart]:
        flat = flatten({name: thing.state_dict() for name, thing in self._things.items()})
        text = torch.frombuffer(bytearray(flat.text), dtype=torch.uint8)
        return [RawPart(Dtype.UINT8, raw(text)), *map(raw_part, flat.tensors)]

    def load(self, step: int, parts: Sequence[RawPart]) -> None:
        if not parts or parts[0].dtype is not Dtype.UINT8:
            raise Mismatch("a state came that can't be read: it does not begin with its description.")
        state = unflatten(parts[0].data, [_tensor(part) for part in parts[1:]])
        if not isinstance(state, dict) or list(state) != list(self._things):
            names = list(state) if isinstance(state, dict) else state
            raise Mismatch(f"another worker's state has {names}, this one's {list(self._things)}.")
        for name, thing in self._things.items():
            try:
                thing.load_state_dict(state[name])
            except (RuntimeError, ValueError, LookupError, TypeError) as error:
                raise Mismatch(f"another worker's {name} does not fit this one's: {error}") from error


def _tensor(part: RawPart) -> torch.Tensor:
    dtype = _TORCH[part.dtype]
    return torch.frombuffer(part.data, dtype=dtype) if part.data.nbytes else torch.empty(0, dtype=dtype)
