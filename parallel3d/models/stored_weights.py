"""Stored weights: a folder of safetensors files, read one tensor at a time. Pickles are never loaded."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from parallel3d.config.errors import problem_of_key
from runtime.errors import ConfigError

_ONE_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True)
class StoredWeights:
    """Stored tensors by their paths in a model."""

    folder: Path
    places: Mapping[str, tuple[str, str]]
    """From each path to the file, and the tensor's name in it."""

    def __call__(self, path: str) -> torch.Tensor:
        """The whole tensor, in its stored dtype."""
        file, name = self.places[path]
        with _opened(self.folder / file) as stored:
            tensor: torch.Tensor = stored.get_tensor(name)
            return tensor


def find_weights(folder: Path, wanted: Mapping[str, torch.Tensor], aliases: Iterable[Sequence[str]]) -> StoredWeights:
    """Find where each wanted tensor is stored. Raises ConfigError if one is missing, or has another shape.

    aliases: groups of paths of one tensor, which is stored under at least one of them.
    """
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
    for file in _files(folder):
        shapes |= {name: (file, shape) for name, shape in _shapes(folder / file).items()}
    names = {path: path for path in wanted}
    for group in aliases:
        stored = [path for path in group if path in shapes]
        names |= dict.fromkeys(group, stored[0]) if stored else {}
    _refuse_missing(folder, [path for path, name in names.items() if name not in shapes])
    for path, name in names.items():
        _refuse_other_shape(folder / shapes[name][0], name, shapes[name][1], tuple(wanted[path].shape))
    return StoredWeights(folder, {path: (shapes[name][0], name) for path, name in names.items()})


def _files(folder: Path) -> list[str]:
    if (folder / _ONE_FILE).is_file():
        return [_ONE_FILE]
    if (folder / _INDEX).is_file():
        return _files_of_index(folder)
    pickles = sorted(each.name for suffix in ("bin", "pt", "pth", "ckpt") for each in folder.glob(f"*.{suffix}"))
    if pickles:
        message = f"{pickles[0]} is a pickle, which could run code, and is not read."
        remedy = "Write safetensors: load the model where you trust it, and call its save_pretrained."
        raise _refusal(folder, message, remedy)
    message = f"it has neither {_ONE_FILE} nor {_INDEX}."
    raise _refusal(folder, message, "Give a folder that save_pretrained has written.")


def _files_of_index(folder: Path) -> list[str]:
    try:
        files = sorted({str(file) for file in json.loads((folder / _INDEX).read_text())["weight_map"].values()})
    except (OSError, ValueError, LookupError, AttributeError, TypeError) as error:
        raise _refusal(folder, f"{_INDEX} cannot be read: {error!r}.", "Save the model again.") from error
    for file in files:
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise _refusal(folder, f"{_INDEX} names {file}, which is no safetensors file of this folder.")
    return files


def _shapes(file: Path) -> dict[str, tuple[int, ...]]:
    with _opened(file) as stored:
        return {name: tuple(stored.get_slice(name).get_shape()) for name in stored.keys()}  # noqa: SIM118


def _opened(file: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(file, framework="pt", device="cpu")
    except (OSError, SafetensorError) as error:
        raise _refusal(file.parent, f"{file.name} cannot be read: {error}.", "Save the model again.") from error


def _refuse_missing(folder: Path, missing: Sequence[str]) -> None:
    if missing:
        more = f" (and {len(missing) - 1} more)" if missing[1:] else ""
        message = f"no file there has {missing[0]}{more}."
        raise _refusal(folder, message, "Save the whole causal model, with the names that its parameters have.")


def _refuse_other_shape(file: Path, name: str, stored: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if stored != wanted:
        message = f"{name} in {file.name} is {list(stored)}, but by config.json it is {list(wanted)}."
        raise _refusal(file.parent, message, "Save the model again, with its configuration.")


def _refusal(folder: Path, message: str, remedy: str = "") -> ConfigError:
    return problem_of_key("model.args.path", str(folder), message, remedy)
