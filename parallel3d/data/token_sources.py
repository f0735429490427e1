"""Token sources: the bytes of text files, or a file of token numbers, as one long sequence read piece by piece."""

from __future__ import annotations

import bisect
import itertools
import os
import stat
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from parallel3d.config.errors import ConfigProblems, problem_of_key
from runtime.errors import DataError

_NUMPY_MAGIC = b"\x93NUMPY"
_LOOKED_AT = 8192  # bytes at the start of a file, in which a zero says that it is not text, as git does
# Tests are most of the library and unusual text; some distributions leave the others out, or package them apart.
_NOT_OF_LIBRARY = frozenset(
    ("test", "tests", "idle_test", "distutils", "ensurepip", "idlelib", "lib2to3", "tkinter", "turtledemo", "venv")
)


class TextFile(NamedTuple):
    """A file and its size at the start."""

    path: str
    num_bytes: int


class TextFiles:
    """Files one after another. A piece is read from disk when it is asked for: large folders need no memory, and ranks
    of one host share the page cache."""

    dtype = np.dtype(np.uint8)

    def __init__(self, files: Sequence[TextFile]) -> None:
        self._files = files
        self._ends = list(itertools.accumulate(file.num_bytes for file in files))

    def __len__(self) -> int:
        return self._ends[-1]

    def read(self, start: int, stop: int) -> NDArray[np.uint8]:
        """Bytes start..stop-1 of the sequence."""
        pieces = []
        number = bisect.bisect_right(self._ends, start)
        while start < stop:
            begin, end = self._ends[number] - self._files[number].num_bytes, min(stop, self._ends[number])
            pieces.append(_read(self._files[number], start - begin, end - start))
            start, number = end, number + 1
        return np.frombuffer(b"".join(pieces), np.uint8)


def _read(file: TextFile, offset: int, length: int) -> bytes:
    try:
        with open(file.path, "rb", buffering=0) as opened:
            found = os.pread(opened.fileno(), length, offset)
    except OSError as error:
        raise DataError(f"data.path: {file.path} can no longer be read: {error.strerror}.") from error
    if len(found) < length:
        raise DataError(f"data.path: {file.path} had {file.num_bytes} bytes at the start, and now has fewer.")
    return found


def text_files(path: str) -> list[TextFile]:
    """This file, or the folder's text files in the order of their paths."""
    if not os.path.isdir(path):
        return [TextFile(path, require_file(path))]
    try:
        files = [file for file in map(_with_size, _walk(path)) if file.num_bytes and _is_text(file.path)]
    except OSError as error:
        raise _unreadable(path, error) from error
    if not files:
        raise problem_of_key("data.path", path, "no text file in this folder.", "Name a folder or a file with text.")
    return files


def standard_library() -> list[TextFile]:
    """Python's own modules, the same on every machine with the same Python."""
    root = sysconfig.get_path("stdlib")
    # Only Python's own modules: packages may be installed there too, and some files depend on the machine.
    own = sys.stdlib_module_names - _NOT_OF_LIBRARY
    names = sorted(os.listdir(root)) if os.path.isdir(root) else []
    modules = [os.path.join(root, name) for name in names if name.removesuffix(".py") in own]
    paths = [path for module in modules for path in _inside(module) if path.endswith(".py")]
    files = [file for file in map(_with_size, paths) if file.num_bytes]
    if not files:
        message = f"no sources of the standard library in {root}."
        raise problem_of_key("data.path", None, message, "Set data.path to a text file or a folder of them.")
    return files


def require_file(path: str) -> int:
    """The size of a readable file. Raises ConfigError for anything else."""
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
    except OSError as error:
        raise _unreadable(path, error) from error
    if not stat.S_ISREG(status.st_mode):
        raise problem_of_key("data.path", path, "not a file.", "Name a file.")
    return status.st_size


def _unreadable(path: str, error: OSError) -> ConfigProblems:
    where = "" if error.filename in (None, path) else f"{error.filename}: "
    remedy = f"Check the name; the current folder is {os.getcwd()}." if isinstance(error, FileNotFoundError) else ""
    reason = (error.strerror or str(error)).lower()
    return problem_of_key("data.path", path, f"{where}{reason}.", remedy or "Name a file that can be read.")


def _inside(path: str) -> Iterator[str]:
    """The module's file, or its package's files."""
    return _walk(path, _NOT_OF_LIBRARY) if os.path.isdir(path) else iter((path,))


def _walk(root: str, leave_out: frozenset[str] = frozenset()) -> Iterator[str]:
    """Files under the folder, sorted by name on each level; hidden ones are left out."""
    with os.scandir(root) as entries:
        shown = [entry for entry in entries if not entry.name.startswith(".") and entry.name not in leave_out]
    for entry in sorted(shown, key=lambda entry: entry.name):
        # Links to folders are not followed: they may form a cycle.
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(entry.path, leave_out)
        elif entry.is_file():
            yield entry.path


def _with_size(path: str) -> TextFile:
    return TextFile(path, os.stat(path).st_size)


def _is_text(path: str) -> bool:
    with open(path, "rb", buffering=0) as file:
        return b"\0" not in file.read(_LOOKED_AT)


class TokenFile:
    """A file of little-endian numbers of one type, mapped from disk: ranks of one host share its pages."""

    def __init__(self, path: str, token_type: str) -> None:
        self.dtype = np.dtype(token_type).newbyteorder("<")
        _check(path, token_type, self.dtype.itemsize)
        self._tokens = np.memmap(path, self.dtype, mode="r")

    def __len__(self) -> int:
        return len(self._tokens)

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Numbers start..stop-1; the system reads their pages when they are used."""
        return self._tokens[start:stop]


def _check(path: str, token_type: str, num_bytes: int) -> None:
    size = require_file(path)
    with open(path, "rb") as file:
        is_numpy = file.read(len(_NUMPY_MAGIC)) == _NUMPY_MAGIC
    if is_numpy:
        raise problem_of_key(
            "data.path", path, "a .npy file has a header before its numbers.", "Write it with array.tofile(path)."
        )
    if size == 0:
        raise problem_of_key("data.path", path, "the file is empty.", "Name a file of tokens.")
    if size % num_bytes:
        message = f"{os.path.basename(path)} has {size} bytes, which is not a multiple of {token_type}'s {num_bytes}."
        raise problem_of_key("data.path", path, message, "Set data.token_type to that of the file.")
