"""A state of nested values and tensors as JSON and raw tensors, and back: nothing from a socket is unpickled."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from runtime.errors import InvalidCall, Mismatch

_PLAIN = (str, int, float, bool, type(None))
_TEXT_OR_BRACKET = re.compile(rb'"(?:[^"\\]|\\.)*"|[][{}]')
_DEEPEST = 200  # brackets: states of torch have less than ten levels, of two each
_Shelf = tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int]
"""What says that two tensors are one."""


class Flat(NamedTuple):
    """A state, flattened."""

    text: bytes
    """JSON: the values, with the numbers and shapes of tensors where these were."""
    tensors: list[torch.Tensor]
    """On the CPU and contiguous; one that is there twice, such as a tied weight, comes once."""


def flatten(state: Any) -> Flat:
    """Of dicts, lists and tuples of tensors and plain values. Raises InvalidCall, which names what is neither."""
    tensors: list[torch.Tensor] = []
    places: dict[_Shelf, int] = {}

    def put(tensor: torch.Tensor) -> int:
        shelf = (tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.data_ptr() or -len(tensors))
        if shelf not in places:
            places[shelf] = len(tensors)
            tensors.append(tensor.detach().cpu().contiguous())
        return places[shelf]

    def convert(value: Any, path: str) -> Any:
        if isinstance(value, torch.Tensor):
            if value.layout is not torch.strided:
                raise InvalidCall(f"the state at {path} is a tensor of layout {value.layout}; only dense ones travel.")
            return {"tensor": put(value), "shape": list(value.shape)}
        if isinstance(value, Mapping):
            return {"dict": [[convert(key, path), convert(each, f"{path}.{key}")] for key, each in value.items()]}
        if isinstance(value, tuple | list):
            kind = "tuple" if isinstance(value, tuple) else "list"
            return {kind: [convert(each, f"{path}[{at}]") for at, each in enumerate(value)]}
        if isinstance(value, _PLAIN):
            return value
        raise InvalidCall(
            f"the state at {path} is a {type(value).__name__}; only tensors, numbers, text, lists and dicts travel."
        )

    text = json.dumps(convert(state, "state")).encode()
    return Flat(text, tensors)


def unflatten(text: bytes | memoryview, tensors: Sequence[torch.Tensor]) -> Any:
    """What was flattened, with these tensors, which are flat. Raises Mismatch where they don't fit the text."""
    try:
        return _restore(json.loads(_shallow(bytes(text))), tensors)
    except (ValueError, TypeError, LookupError) as error:
        raise Mismatch(f"a state came that can't be read: {type(error).__name__}: {error}") from None


def _shallow(text: bytes) -> bytes:
    """Itself. Python 3.11 counts its recursion wrongly after JSON that is nested too deep, so such is never parsed."""
    depth = 0
    for token in _TEXT_OR_BRACKET.finditer(text):
        depth += {b"[": 1, b"{": 1, b"]": -1, b"}": -1}.get(token[0], 0)
        if depth > _DEEPEST:
            raise ValueError(f"nested deeper than {_DEEPEST} levels")
    return text


def _restore(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    match value:
        case {"tensor": int(index), "shape": [*shape]} if 0 <= index < len(tensors):
            if math.prod(shape) != tensors[index].numel():
                raise ValueError(f"tensor {index} has {tensors[index].numel()} elements, not {shape}")
            return tensors[index].view(shape)
        case {"dict": [*pairs]}:
            return {_restore(key, tensors): _restore(each, tensors) for key, each in pairs}
        case {"list": [*values]}:
            return [_restore(each, tensors) for each in values]
        case {"tuple": [*values]}:
            return tuple(_restore(each, tensors) for each in values)
        case str() | int() | float() | None:
            return value
    raise ValueError(f"{str(value)[:80]} is no part of a state")
