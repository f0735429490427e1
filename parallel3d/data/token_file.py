"""A file of token numbers, mapped from disk: the ranks of one host share its pages."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parallel3d.config.errors import problem_of_key
from parallel3d.data.text_files import require_file

_NUMPY_MAGIC = b"\x93NUMPY"


class TokenFile:
    """Little-endian numbers of one type, and nothing else."""

    def __init__(self, path: str, token_type: str) -> None:
        self.dtype = np.dtype(token_type).newbyteorder("<")
        _check(path, token_type, self.dtype.itemsize)
        self._tokens = np.memmap(path, self.dtype, mode="r")

    def __len__(self) -> int:
        return len(self._tokens)

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Numbers start..stop-1; pages are read when they are touched."""
        return self._tokens[start:stop]


def _check(path: str, token_type: str, num_bytes: int) -> None:
    size = require_file(path)
    with open(path, "rb") as file:
        is_numpy = file.read(len(_NUMPY_MAGIC)) == _NUMPY_MAGIC
    if is_numpy:
        raise problem_of_key(
            "data.path", path, "a .npy file has more in it than numbers.", "Write it with array.tofile(path)."
        )
    if size == 0:
        raise problem_of_key("data.path", path, "the file is empty.", "Name a file of tokens.")
    if size % num_bytes:
        message = f"{os.path.basename(path)} has {size} bytes, which is not a multiple of {token_type}'s {num_bytes}."
        raise problem_of_key("data.path", path, message, "Set data.token_type to that of the file.")
