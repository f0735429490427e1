"""Reading a secret token from a file."""

from __future__ import annotations

import os
import stat

LEAST_TOKEN_BYTES = 16
_MOST_TOKEN_BYTES = 64 * 1024  # longer than any HTTP header; limits how much of a wrong file is read


class UnusableToken(ValueError):
    """The message gives the reason, without the file's name."""

    def __init__(self, message: str, remedy: str = "Write a new one: (umask 077; openssl rand -hex 24 > FILE)") -> None:
        super().__init__(message)
        self.remedy = remedy


def read_token(path: str, *, is_private: bool = False) -> bytes:
    """The token in a file, without surrounding white space. Raises OSError, and UnusableToken if it is too short.

    is_private: also refuse a file that every user of this host can read.
    """
    with open(path, "rb") as file:
        is_open_to_all = os.fstat(file.fileno()).st_mode & stat.S_IROTH
        token = file.read(_MOST_TOKEN_BYTES + 1).strip()
    if is_private and is_open_to_all:
        raise UnusableToken("everybody on this host can read the token.", f"chmod 600 {path}")
    if not LEAST_TOKEN_BYTES <= len(token) <= _MOST_TOKEN_BYTES:
        size = f"{LEAST_TOKEN_BYTES} to {_MOST_TOKEN_BYTES} bytes"
        raise UnusableToken(f"a token has {size}, and this one has {len(token)}.")
    return token
