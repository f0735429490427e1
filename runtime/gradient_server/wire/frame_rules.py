"""Which frames may come, and how long they may be: by side, version and whether the join is over."""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum

from runtime.gradient_server.wire.messages import (
    LAYOUTS,
    MAX_FRAME_V1,
    MAX_FRAME_V2,
    MAX_SMALL,
    TAGS_V1,
    Reason,
    WireError,
)


class Side(Enum):
    """Whose reader it is: a server is told other things than a worker."""

    SERVER = "server"
    WORKER = "worker"


MOST = {None: MAX_SMALL, 1: MAX_FRAME_V1, 2: MAX_FRAME_V2}
"""Bytes of a frame whose tag is not known yet, by the version that was joined."""
_JOINS = {0x01, 0x02, 0x20, 0x21, 0x22, 0x23}
_BEFORE_JOIN = {Side.SERVER: {0x01, 0x20, 0x22}, Side.WORKER: {0x02, 0x07, 0x21, 0x23, 0x24, 0x2D}}
_AFTER_JOIN = {
    (Side.SERVER, 1): {0x04, 0x06, 0x07, 0x08, 0x0A},
    (Side.SERVER, 2): {0x27, 0x28, 0x29, 0x2C, 0x2D, 0x2E},
    (Side.WORKER, 1): {0x03, 0x05, 0x06, 0x07, 0x09, 0x0B},
    (Side.WORKER, 2): {0x24, 0x25, 0x26, 0x27, 0x28, 0x2A, 0x2B, 0x2C, 0x2D, 0x2E},
}


def check_tag(tag: int, side: Side, version: int | None, versions: Collection[int]) -> None:
    """That this side takes it now. version: that was joined. versions: that may join."""
    if version is not None and tag in _AFTER_JOIN[side, version]:
        return
    if tag not in LAYOUTS:
        raise WireError(Reason.UNKNOWN_TAG, f"{tag:#04x}.")
    name = LAYOUTS[tag].kind.__name__
    if version is not None:
        reason = Reason.ALREADY_JOINED if tag in _JOINS else Reason.UNEXPECTED
        raise WireError(reason, f"{name}, to a {side.value} that speaks version {version}.")
    if tag not in _BEFORE_JOIN[side]:
        raise WireError(Reason.NOT_JOINED, f"{name}.")
    spoken = 1 if tag in TAGS_V1 else 2
    if spoken not in versions:
        raise WireError(Reason.VERSION_REFUSED, f"{name} is of version {spoken}.")
