"""The dataset that the configuration names, as numbered samples."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from parallel3d.config.errors import problem_of_key
from parallel3d.config.sections import CustomModel, HfModel, RunConfig
from parallel3d.data.batch import Batch
from parallel3d.data.token_sources import TextFiles, TokenFile, standard_library, text_files
from parallel3d.data.user_dataset import make_user_dataset
from parallel3d.data.windows import Limit, Windows


class Dataset(Protocol):
    """Samples by index. An index means the same sample on every rank."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        """One sample: (input, target)."""

    def batch(self, indices: Sequence[int]) -> Batch:
        """These samples as one batch; raises DataError, which names the sample at fault."""


def make_dataset(config: RunConfig) -> Dataset:
    """The dataset of a run. Raises ConfigError, which names the key; samples are read when they are asked for."""
    if config.data.factory is not None:
        dataset: Dataset = make_user_dataset(config.data.factory, config.train.seed)
        if len(dataset) < config.batch_size:
            message = f"len(d) is {len(dataset)}, and one step takes {config.batch_size} samples."
            remedy = f"Make it longer, or set train.batch_size to {len(dataset)} or less."
            raise problem_of_key("data.factory", config.data.factory, message, remedy)
        return dataset
    return _windows(config)


def _windows(config: RunConfig) -> Windows:
    tokens = _tokens(config)
    windows = Windows(tokens, config.sequence, vocabulary(config))
    if len(windows) < config.batch_size:
        needed = config.batch_size * config.sequence + 1
        message = (
            f"{len(tokens)} tokens are too few: one step of {config.batch_size} samples of {config.sequence} tokens "
            f"needs {needed}."
        )
        remedy = "Give more text or tokens, or make train.batch_size or the sequence smaller."
        raise problem_of_key("data.path", config.data.path, message, remedy)
    return windows


def _tokens(config: RunConfig) -> TextFiles | TokenFile:
    path = config.data.path
    if config.data.source == "tokens":
        assert path is not None, "checked by config/rules"
        return TokenFile(path, config.data.token_type)
    return TextFiles(standard_library() if path is None else text_files(path))


def vocabulary(config: RunConfig) -> Limit | None:
    """The size of the model's vocabulary, and the key that says so; None where the configuration does not say."""
    model = config.model
    if isinstance(model, HfModel) and model.args.path is not None:
        return _stored_vocabulary(model.args.path)
    if isinstance(model, HfModel):
        key, size = "model.args.config.vocab_size", (model.args.config or {}).get("vocab_size")
    elif isinstance(model, CustomModel):
        key, size = "model.args.vocabulary", model.args.get("vocabulary")
    else:
        key, size = "model.args.vocabulary", model.args.vocabulary
    return Limit(key, size) if type(size) is int and size > 0 else None


def _stored_vocabulary(folder: str) -> Limit | None:
    """None for a file that cannot be read: building the model reports what is wrong with it."""
    try:
        size = json.loads((Path(folder) / "config.json").read_bytes())["vocab_size"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return Limit("model.args.path", size, given=folder) if type(size) is int and size > 0 else None
