"""Reading frames, sans-io: bytes in; messages and pieces of long vectors out. Vectors are never held whole."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

import numpy
import xxhash

from runtime.gradient_server.wire.fields import Layout
from runtime.gradient_server.wire.messages import (
    LAYOUTS,
    LENGTH_BYTES,
    MAX_CHUNK,
    MAX_FRAME,
    MAX_FRAME_V1,
    MAX_FRAME_V2,
    MAX_SMALL,
    TAGS_V1,
    AveragedBlockGradient,
    AveragedGradient,
    AveragedNonBlockGradient,
    BlockGradientPayload,
    Bytes,
    Chunk,
    Codec,
    GradientPayload,
    Message,
    NonBlockGradientPayload,
    Reason,
    WireError,
    checksum,
    decode,
    item_bytes,
    unpack,
)


class Side(Enum):
    """Whose reader it is: a server receives other messages than a worker."""

    SERVER = "server"
    WORKER = "worker"


MOST = {None: MAX_SMALL, 1: MAX_FRAME_V1, 2: MAX_FRAME_V2}
"""Most bytes of a frame before its tag is known, by the joined version."""
_JOINS = {0x01, 0x02, 0x20, 0x21, 0x22, 0x23}
_BEFORE_JOIN = {Side.SERVER: {0x01, 0x20, 0x22}, Side.WORKER: {0x02, 0x07, 0x21, 0x23, 0x24, 0x2D}}
_AFTER_JOIN = {
    (Side.SERVER, 1): {0x04, 0x06, 0x07, 0x08, 0x0A},
    (Side.SERVER, 2): {0x27, 0x28, 0x29, 0x2C, 0x2D, 0x2E},
    (Side.WORKER, 1): {0x03, 0x05, 0x06, 0x07, 0x09, 0x0B},
    (Side.WORKER, 2): {0x24, 0x25, 0x26, 0x27, 0x28, 0x2A, 0x2B, 0x2C, 0x2D, 0x2E},
}


def check_tag(tag: int, side: Side, version: int | None, versions: Collection[int]) -> None:
    """Raise WireError unless this side accepts the tag now. version: the joined one. versions: those that may join."""
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


VectorMessages: TypeAlias = (
    GradientPayload
    | AveragedGradient
    | BlockGradientPayload
    | AveragedBlockGradient
    | NonBlockGradientPayload
    | AveragedNonBlockGradient
    | Chunk
)


@dataclass(frozen=True, slots=True)
class VectorBegins:
    """head: the message with an empty vector; fields after the vector are still 0."""

    head: VectorMessages
    count: int
    num_bytes: int
    item_bytes: int
    """Bytes of one element; 0 if there are none."""


@dataclass(frozen=True, slots=True)
class VectorPiece:
    """Whole elements. `data` is valid only until the next item."""

    offset_bytes: int
    data: memoryview


@dataclass(frozen=True, slots=True)
class VectorEnds:
    """message: all fields except the vector. A chunk's checksum is verified."""

    message: VectorMessages


Item: TypeAlias = Message | VectorBegins | VectorPiece | VectorEnds
Items: TypeAlias = Sequence[Item]


_NO_VECTOR: Any = numpy.empty(0, "<f4")
_ITEM_V1 = 4


class FrameReader:
    """Reads one connection's frames. An invalid frame raises WireError, then and on every later call.

    length │ tag │ body                                    a small message, held until it is complete
    length │ tag │ head │ vector … │ tail                  a vector's bytes are passed on as they arrive
    length │ tag │ head │ packed                           a packed chunk, held, then unpacked
    """

    __slots__ = (
        "_error",
        "_hash",
        "_head",
        "_head_bytes",
        "_held",
        "_is_first",
        "_item_bytes",
        "_layout",
        "_left",
        "_length",
        "_max_frame",
        "_need",
        "_offset",
        "_side",
        "_stage",
        "_target",
        "_version",
        "_versions",
    )

    def __init__(
        self, side: Side = Side.SERVER, *, versions: Collection[int] = (1, 2), max_frame: int = MAX_FRAME_V1
    ) -> None:
        """versions: those that may join. max_frame: limit in bytes of any frame, if less than the protocol's."""
        self._side, self._versions, self._max_frame = side, frozenset(versions), max_frame
        self._version: int | None = None
        self._error: tuple[Reason, str] | None = None
        self._is_first = True
        self._held = bytearray()
        self._left = 0  # bytes of the vector that are still to arrive
        self._offset = self._item_bytes = self._head_bytes = 0
        self._hash: xxhash.xxh3_64 | None = None
        self._target: memoryview | None = None
        """Where the rest of the vector is written to, instead of being passed on in pieces."""
        self._head: Any = None
        self._layout: Layout
        # Plain functions: bound methods would be reference cycles, in each of 1,000 readers.
        self._stage: Callable[[FrameReader], Iterable[Item]]
        self._next_frame()

    def joined(self, version: int) -> None:
        """From now on accept frames of this version, up to its limits, and no joins."""
        self._version = version

    @property
    def version(self) -> int | None:
        """None before the join."""
        return self._version

    @property
    def is_mid_frame(self) -> bool:
        """Whether a frame has arrived in part."""
        return self._stage is not FrameReader._on_length or bool(self._held)

    def receive_into(self, target: memoryview) -> None:
        """Write all bytes of the vector that has just begun to `target`; it yields no pieces."""
        assert len(target) == self._left
        self._target = target

    @property
    def room(self) -> memoryview | None:
        """Where the next bytes may be written to; call `wrote` afterwards instead of `feed`. None: use `feed`."""
        return self._target if self._left else None

    @property
    def num_wanted(self) -> int:
        """Bytes up to the start of the next vector, if one follows with a head as long as this one's; otherwise bytes
        until the next item."""
        return self._left + self._need + self._head_bytes if self._left else self._need - len(self._held)

    @property
    def num_split(self) -> int:
        """Bytes of an element that has arrived in part."""
        return len(self._held) if self._left else 0

    def take_split(self) -> bytes:
        """Remove and return those bytes, to be fed again together with the rest of the element."""
        split = bytes(self._held[: self.num_split])
        if split:
            self._held.clear()
            self._left += len(split)
        return split

    def feed(self, data: Bytes) -> Iterator[Item]:
        """The items that these bytes complete. Exhaust it before reusing the data's memory."""
        return self._keeping_errors(self._after_split(memoryview(data)))

    def wrote(self, num_bytes: int) -> Iterator[Item]:
        """The items that are complete after `num_bytes` were written to `room`."""
        return self._keeping_errors(self._written(num_bytes))

    def _keeping_errors(self, items: Iterator[Item]) -> Iterator[Item]:
        if self._error is not None:
            raise WireError(*self._error)
        try:
            yield from items
        except WireError as error:
            self._error = (error.reason, error.detail)  # not the error itself: its traceback keeps the data alive
            self._held, self._head, self._target = bytearray(), None, None
            raise

    def _after_split(self, data: memoryview) -> Iterator[Item]:
        """As `_items`, but a split element becomes a piece of its own: joining it with the data would copy all of
        the data."""
        if self.num_split:
            missing = self._item_bytes - self.num_split
            yield from self._items(memoryview(self.take_split() + bytes(data[:missing])))
            data = data[missing:]
        yield from self._items(data)

    def _items(self, data: memoryview) -> Iterator[Item]:
        at, end, held = 0, len(data), self._held
        while at < end:
            if self._left:
                begin, at = at, min(end, at + self._left)
                if self._target is None:
                    self._left -= at - begin
                    yield from self._pieces(data[begin:at])
                else:
                    self._target[: at - begin] = data[begin:at]
                    self._count_written(at - begin)
            else:
                begin, at = at, min(end, at + self._need - len(held))
                held += data[begin:at]
            while not self._left and len(held) >= self._need:
                yield from self._stage(self)

    def _written(self, num_bytes: int) -> Iterator[Item]:
        self._count_written(num_bytes)
        while not self._left and len(self._held) >= self._need:
            yield from self._stage(self)

    def _count_written(self, num_bytes: int) -> None:
        assert self._target is not None
        if self._hash is not None:
            self._hash.update(self._target[:num_bytes])
        self._target = self._target[num_bytes:]
        self._left -= num_bytes

    def _pieces(self, data: memoryview) -> Items:
        """Whole elements of the vector's next bytes; a split one is held until its rest arrives."""
        num_split = len(data) % self._item_bytes
        if num_split:
            self._held += data[-num_split:]
            data = data[:-num_split]
        if not data:
            return ()
        if self._hash is not None:
            self._hash.update(data)
        offset, self._offset = self._offset, self._offset + len(data)
        return (VectorPiece(offset, data),)

    def _next_frame(self) -> None:
        self._held.clear()
        self._head = self._hash = self._target = None
        self._need, self._stage = LENGTH_BYTES, FrameReader._on_length

    def _on_length(self) -> Items:
        length = int.from_bytes(self._held, "big")
        if length == 0:
            raise WireError(Reason.EMPTY)
        if self._is_first and length > MAX_FRAME_V1:
            raise WireError(Reason.NOT_A_FRAME, f"it begins with {bytes(self._held)!r}.")
        self._check_length(length, MOST[self._version])
        self._is_first = False
        self._held.clear()
        self._length, self._need, self._stage = length, 1, FrameReader._on_tag
        return ()

    def _check_length(self, length: int, most: int) -> None:
        most = min(most, self._max_frame)
        if length > most:
            raise WireError(Reason.TOO_LONG, f"a frame of {length} bytes, of at most {most}.")

    def _on_tag(self) -> Items:
        tag = self._held[0]
        check_tag(tag, self._side, self._version, self._versions)
        self._check_length(self._length, MAX_FRAME[tag])
        self._layout = LAYOUTS[tag]
        if self._layout.streamed is None:
            self._need, self._stage = self._length, FrameReader._on_body
        else:
            self._stage = FrameReader._on_head
            self._find_head()
        return ()

    def _on_body(self) -> Items:
        message = decode(bytes(self._held))
        self._next_frame()
        return (message,)

    def _find_head(self) -> None:
        """Set `_need` to the bytes before the vector, as far as they are known."""
        self._need = self._layout.head_bytes(self._held, 1)
        if self._need > self._length:
            raise WireError(Reason.TRUNCATED, f"{self._layout.kind.__name__} of {self._length} bytes.")
        if self._need > MAX_SMALL:
            raise WireError(Reason.TOO_LONG, f"{self._need} bytes before a vector, of at most {MAX_SMALL}.")

    def _on_head(self) -> Items:
        self._find_head()
        if len(self._held) < self._need:
            return ()
        values, count = self._layout.take_head(bytes(self._held))
        num_bytes = self._length - self._need
        self._head_bytes = LENGTH_BYTES + self._need
        self._held.clear()
        return self._begin_chunk(values, num_bytes) if count is None else self._begin_vector(values, count, num_bytes)

    def _begin_vector(self, values: list[Any], count: int, num_bytes: int) -> Items:
        expected = count * _ITEM_V1 + self._layout.tail_bytes
        if expected != num_bytes:
            reason = Reason.TRUNCATED if expected > num_bytes else Reason.TRAILING
            raise WireError(reason, f"{self._layout.kind.__name__} of {count} elements in {self._length} bytes.")
        self._head = self._layout.kind(*values, _NO_VECTOR, *self._layout.no_tail)
        return self._begin(count, count * _ITEM_V1, _ITEM_V1)

    def _begin_chunk(self, values: list[Any], num_bytes: int) -> Items:
        head: Chunk = self._layout.kind(*values, b"")
        self._head = head
        if head.codec is Codec.NONE:
            self._hash = xxhash.xxh3_64()
            return self._begin(head.count, num_bytes, item_bytes(head.count, num_bytes))
        if num_bytes > MAX_CHUNK:
            raise WireError(Reason.TOO_LONG, f"a packed chunk of {num_bytes} bytes, of at most {MAX_CHUNK}.")
        self._need, self._stage = num_bytes, FrameReader._on_packed
        return ()

    def _begin(self, count: int, num_bytes: int, size: int) -> Items:
        self._left, self._offset, self._item_bytes = num_bytes, 0, size
        self._need, self._stage = self._layout.tail_bytes, FrameReader._on_tail
        return (VectorBegins(self._head, count, num_bytes, size),)

    def _on_tail(self) -> Items:
        message = self._head
        if self._hash is not None:
            _check_checksum(message, self._hash.intdigest())
        else:
            message = self._layout.with_tail(message, bytes(self._held))
        self._next_frame()
        return (VectorEnds(message),)

    def _on_packed(self) -> Iterator[Item]:
        head: Chunk = self._head
        data = unpack(bytes(self._held), head.count)
        size = item_bytes(head.count, len(data))
        _check_checksum(head, checksum(data))
        self._next_frame()
        self._left = len(data)
        yield VectorBegins(head, head.count, len(data), size)
        target, self._target, self._left = self._target, None, 0
        if target is not None:
            target[:] = data
        elif data:
            yield VectorPiece(0, memoryview(data))
        yield VectorEnds(head)


def _check_checksum(head: Chunk, found: int) -> None:
    if found != head.checksum:
        where = f"part {head.part} from element {head.offset}"
        raise WireError(Reason.BAD_CHECKSUM, f"{where}: {found:#018x}, not {head.checksum:#018x}.")
