"""Files of a folder that may come from anybody: only real files are read, and never more than there is room for."""

from __future__ import annotations

import errno
import gzip
import os
import stat
from io import BufferedReader
from pathlib import Path

_PIECE = 1 << 20


def open_regular(path: Path) -> BufferedReader:
    """Raises OSError also for what is no file: a pipe would be waited for, and a device never ends."""
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115  returned
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return file


def read_bounded(path: Path, most: int) -> bytes:
    """All of it. Raises OSError, also where that is more than `most` bytes."""
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > most:
            raise _too_large(path, most)
        return file.read()


def unzip_bounded(path: Path, most: int) -> bytes:
    """What a gzip file holds. Raises OSError, also where that is more than `most` bytes: a small file may hold any
    number of zeros. And EOFError and zlib.error, as gzip does."""
    pieces, size = [], 0
    with open_regular(path) as zipped, gzip.GzipFile(fileobj=zipped) as file:
        while piece := file.read(_PIECE):
            pieces.append(piece)
            size += len(piece)
            if size > most:
                raise _too_large(path, most)
    return b"".join(pieces)


def _too_large(path: Path, most: int) -> OSError:
    return OSError(errno.EFBIG, f"it holds more than {most >> 20} MiB", str(path))
