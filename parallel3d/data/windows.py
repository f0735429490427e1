"""Windows of a long token sequence as samples, each with the next tokens as its target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from parallel3d.data.batch import Batch
from runtime.errors import DataError


class Tokens(Protocol):
    """A long sequence of token numbers that is not held in memory."""

    dtype: np.dtype[Any]

    def __len__(self) -> int: ...

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Tokens start..stop-1."""


class Limit(NamedTuple):
    """The size of a vocabulary, and the key that says so."""

    key: str
    size: int
    given: str | None = None
    """The key's value, where that is not the size itself but a folder that has it."""


class Windows:
    """Sample i is `sequence` tokens from i * sequence on, and its target the same shifted by one; samples don't
    overlap."""

    def __init__(self, tokens: Tokens, sequence: int, vocabulary: Limit | None = None) -> None:
        self._tokens, self._sequence, self._vocabulary = tokens, sequence, vocabulary
        limits = np.iinfo(tokens.dtype)
        self._is_checked = limits.min < 0 or (vocabulary is not None and limits.max >= vocabulary.size)

    def __len__(self) -> int:
        return max(0, len(self._tokens) - 1) // self._sequence

    def __str__(self) -> str:
        return f"{len(self)} samples of {self._sequence} tokens"

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        inputs, targets = self.batch([index])
        assert isinstance(inputs, torch.Tensor)
        return inputs[0], targets[0]

    def batch(self, indices: Sequence[int]) -> Batch:
        """These samples as one batch."""
        length = self._sequence
        # numpy only: torch would start its own threads for the loading thread.
        rows = np.empty((len(indices), length + 1), np.int64)
        for row, index in zip(rows, indices, strict=True):
            row[:] = self._tokens.read(index * length, (index + 1) * length + 1)
        if self._is_checked:
            self._check(rows, indices)
        inputs, targets = np.ascontiguousarray(rows[:, :-1]), np.ascontiguousarray(rows[:, 1:])
        return Batch(torch.from_numpy(inputs), torch.from_numpy(targets))

    def _check(self, rows: NDArray[np.int64], indices: Sequence[int]) -> None:
        """Refuse tokens outside of the vocabulary here: an embedding would not say where they come from."""
        lowest, highest = int(rows.min()), int(rows.max())
        if self._vocabulary is not None and highest >= self._vocabulary.size:
            key, size, given = self._vocabulary
            wanted = f"Set {key} to" if given is None else "Give a model with a vocabulary of"
            raise DataError(
                f"{key} = {size if given is None else given}: {self._found(highest, rows, indices)}, and the tokens "
                f"end at {size - 1}.\n{wanted} {highest + 1} or more, or give data that fits."
            )
        if lowest < 0:
            raise DataError(
                f"data.path: {self._found(lowest, rows, indices)}, and tokens begin at 0.\n"
                "Set data.token_type to that of the file."
            )

    def _found(self, token: int, rows: NDArray[np.int64], indices: Sequence[int]) -> str:
        row, column = np.argwhere(rows == token)[0].tolist()
        return f"sample {indices[row]} has the token {token} at {indices[row] * self._sequence + column} of the data"
