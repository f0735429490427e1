"""The gradient server's wire: a frame is a big-endian u32 length, then a tag byte and little-endian fields."""

from __future__ import annotations

import struct
from typing import TypeAlias, cast

from runtime.gradient_server.wire.chunks import checksum, item_bytes, make_chunk, unpack
from runtime.gradient_server.wire.fields import Bytes, FloatArray, Layout, Source
from runtime.gradient_server.wire.refusals import REASONS, Reason, WireError
from runtime.gradient_server.wire.v1 import (
    MAX_FRAME_V1,
    TAGS_V1,
    AveragedBlockGradient,
    AveragedGradient,
    AveragedNonBlockGradient,
    BlockGradientPayload,
    Component,
    GradientPayload,
    Heartbeat,
    JoinAccepted,
    JoinRequest,
    MessageV1,
    NonBlockGradientPayload,
    ShardAssignment,
    Shutdown,
)
from runtime.gradient_server.wire.v2 import (
    GRADIENT_DTYPES,
    MAX_CHUNK,
    MAX_FRAME_V2,
    MAX_PARTS,
    TAGS_V2,
    VERSION,
    Again,
    Assignment,
    AverageDone,
    Beat,
    Challenge,
    Chunk,
    Codec,
    Dtype,
    GradientDone,
    Hello,
    Kind,
    Leave,
    MessageV2,
    Part,
    Proof,
    Refused,
    StateDone,
    StateWanted,
    Table,
    Welcome,
)

__all__ = [
    "DEFAULT_PORT",
    "GRADIENT_DTYPES",
    "LAYOUTS",
    "LENGTH_BYTES",
    "MAX_CHUNK",
    "MAX_FRAME",
    "MAX_FRAME_V1",
    "MAX_FRAME_V2",
    "MAX_PARTS",
    "MAX_SMALL",
    "MAX_TABLE",
    "REASONS",
    "TAGS_V1",
    "TAGS_V2",
    "VERSION",
    "Again",
    "Assignment",
    "AverageDone",
    "AveragedBlockGradient",
    "AveragedGradient",
    "AveragedNonBlockGradient",
    "Beat",
    "BlockGradientPayload",
    "Bytes",
    "Challenge",
    "Chunk",
    "Codec",
    "Component",
    "Dtype",
    "FloatArray",
    "GradientDone",
    "GradientPayload",
    "Heartbeat",
    "Hello",
    "JoinAccepted",
    "JoinRequest",
    "Kind",
    "Leave",
    "Message",
    "NonBlockGradientPayload",
    "Part",
    "Proof",
    "Reason",
    "Refused",
    "ShardAssignment",
    "Shutdown",
    "StateDone",
    "StateWanted",
    "Table",
    "Welcome",
    "WireError",
    "checksum",
    "decode",
    "encode",
    "encode_parts",
    "item_bytes",
    "make_chunk",
    "unpack",
]

DEFAULT_PORT = 9000
LENGTH_BYTES = 4
MAX_SMALL = 64 * 1024
"""Largest message that is held whole: all except tables and messages with a vector."""
MAX_TABLE = 1 << 20

Message: TypeAlias = MessageV1 | MessageV2

LAYOUTS = {tag: Layout(tag, kind) for tag, kind in (TAGS_V1 | TAGS_V2).items()}
"""By tag."""
MAX_FRAME = {tag: MAX_SMALL if layout.streamed is None else MAX_FRAME_V1 for tag, layout in LAYOUTS.items()} | {
    0x27: MAX_TABLE,
    0x28: MAX_FRAME_V2,
}
"""By tag: the most bytes of a frame after its length."""
_BY_KIND = {layout.kind: layout for layout in LAYOUTS.values()}


def encode(message: Message) -> bytes:
    """The whole frame. Copies vectors; `encode_parts` does not."""
    return b"".join(encode_parts(message))


def encode_parts(message: Message) -> list[Bytes]:
    """The whole frame in pieces; a vector or payload is a view of the message's memory."""
    layout = _BY_KIND[type(message)]
    pieces = [bytes([layout.tag]), *layout.put(message)]
    length = sum(len(piece) for piece in pieces)
    if length > MAX_FRAME[layout.tag]:
        raise WireError(
            Reason.TOO_LONG, f"{layout.kind.__name__} of {length} bytes, of at most {MAX_FRAME[layout.tag]}."
        )
    return _joined([struct.pack(">I", length), *pieces])


def _joined(pieces: list[Bytes]) -> list[Bytes]:
    """Adjacent bytes objects joined; views stay views."""
    merged: list[Bytes] = []
    for piece in pieces:
        if merged and isinstance(piece, bytes) and isinstance(merged[-1], bytes):
            merged[-1] += piece
        else:
            merged.append(piece)
    return merged


def decode(body: Bytes) -> Message:
    """The message in a frame without its length. Does not refer to the body's memory."""
    if not len(body):
        raise WireError(Reason.EMPTY)
    tag = body[0]
    layout = LAYOUTS.get(tag)
    if layout is None:
        raise WireError(Reason.UNKNOWN_TAG, f"{tag:#04x}.")
    if len(body) > MAX_FRAME[tag]:
        raise WireError(Reason.TOO_LONG, f"{layout.kind.__name__} of {len(body)} bytes, of at most {MAX_FRAME[tag]}.")
    message = cast(Message, layout.take(Source(memoryview(body), 1)))
    return message.check() if isinstance(message, Table) else message
