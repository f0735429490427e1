"""A chunk's elements: checksum, packing, and unpacking with a limit."""

from __future__ import annotations

import zlib

import xxhash

from runtime.gradient_server.wire.fields import Bytes
from runtime.gradient_server.wire.refusals import Reason, WireError
from runtime.gradient_server.wire.v2 import MAX_CHUNK, Chunk, Codec, Kind

ITEM_BYTES = (1, 2, 4, 8)
"""Possible sizes of an element."""
_LEVEL = 1  # higher levels hardly make gradients smaller


def checksum(data: Bytes | bytearray) -> int:
    """The checksum of a chunk's unpacked elements."""
    return xxhash.xxh3_64_intdigest(data)


def make_chunk(
    data: memoryview,
    *,
    count: int,
    kind: Kind,
    step: int,
    attempt: int,
    part: int,
    offset: int,
    codec: Codec = Codec.NONE,
) -> Chunk:
    """A chunk of these `count` elements, packed only if that makes it smaller; otherwise a view of `data`."""
    digest = checksum(data)
    if codec is Codec.ZLIB:
        packed = zlib.compress(data, _LEVEL)
        if len(packed) < data.nbytes:
            return Chunk(kind, step, attempt, part, offset, Codec.ZLIB, count, digest, packed)
    return Chunk(kind, step, attempt, part, offset, Codec.NONE, count, digest, data)


def item_bytes(count: int, num_bytes: int) -> int:
    """The size of an element if `count` elements take `num_bytes`; 0 if there are none."""
    if num_bytes > MAX_CHUNK:
        raise WireError(Reason.TOO_LONG, f"a chunk of {num_bytes} bytes, of at most {MAX_CHUNK}.")
    if count == 0 and num_bytes == 0:
        return 0
    if count == 0 or num_bytes % count or num_bytes // count not in ITEM_BYTES:
        raise WireError(Reason.WRONG_LENGTH, f"a chunk of {count} elements in {num_bytes} bytes.")
    return num_bytes // count


def unpack(packed: Bytes | bytearray, count: int) -> bytes:
    """The unpacked elements; never more bytes than `count` elements of the largest size, or than a chunk may hold."""
    cap = min(count * ITEM_BYTES[-1], MAX_CHUNK)
    unpacking = zlib.decompressobj()
    try:
        data = unpacking.decompress(packed, cap + 1)
    except zlib.error as error:
        raise WireError(Reason.BAD_CHECKSUM, f"a packed chunk: {error}.") from None
    if len(data) > cap:
        raise WireError(Reason.UNPACKS_TOO_FAR, f"{len(packed)} bytes to more than {cap}.")
    if not unpacking.eof:
        raise WireError(Reason.TRUNCATED, f"a packed chunk of {len(packed)} bytes.")
    if unpacking.unused_data:
        raise WireError(Reason.TRAILING, f"{len(unpacking.unused_data)} bytes after what was packed.")
    return data
