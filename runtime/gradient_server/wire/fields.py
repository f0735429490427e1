"""Fields of the gradient server's messages: how they are encoded, and their layout in a frame."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from enum import IntEnum
from typing import Annotated, Any, NamedTuple, Protocol, TypeAlias, get_type_hints

import numpy

from runtime.gradient_server.wire.refusals import Reason, WireError

Bytes: TypeAlias = bytes | memoryview
FloatArray: TypeAlias = numpy.ndarray[Any, numpy.dtype[numpy.float32]]


class Source:
    """A cursor over the bytes of one frame."""

    __slots__ = ("at", "data")

    def __init__(self, data: memoryview, at: int = 0) -> None:
        self.data, self.at = data, at

    def take(self, num_bytes: int) -> memoryview:
        """The next bytes, in place."""
        begin, self.at = self.at, self.at + num_bytes
        if self.at > len(self.data):
            raise WireError(Reason.TRUNCATED, f"{num_bytes} bytes from byte {begin} of {len(self.data)}.")
        return self.data[begin : self.at]


class Step(Protocol):
    """One field of a message, or several numbers in a row."""

    def put(self, values: Sequence[Any]) -> Iterable[Bytes]:
        """Encode; long values become memoryviews, which are not copied."""

    def take(self, source: Source) -> Sequence[Any]:
        """Decode the next values of the source. They do not refer to its memory."""

    def span(self, data: Bytes | bytearray, at: int) -> int:
        """The size in bytes from `at`, as far as `data` shows it; without the elements of a streamed vector."""


class Number(NamedTuple):
    """A little-endian number of fixed size; convert: makes an enum or a bool of it."""

    code: str
    convert: Callable[[int], Any] | None = None


class Numbers:
    """Consecutive numbers, encoded by one `struct`."""

    def __init__(self, numbers: Sequence[Number]) -> None:
        self._struct = struct.Struct("<" + "".join(number.code for number in numbers))
        self._converts = [(index, n.convert) for index, n in enumerate(numbers) if n.convert is not None]

    def put(self, values: Sequence[Any]) -> Iterable[Bytes]:
        try:
            return (self._struct.pack(*values),)
        except OverflowError:  # a float beyond float32's range: it becomes infinite
            return (self._struct.pack(*(_single(value) for value in values)),)

    def take(self, source: Source) -> Sequence[Any]:
        values: Sequence[Any] = self._struct.unpack(source.take(self._struct.size))
        if self._converts:
            values = list(values)
            for index, convert in self._converts:
                values[index] = convert(values[index])
        return values

    def span(self, data: Bytes | bytearray, at: int) -> int:
        return self._struct.size


def _single(value: Any) -> Any:
    if not isinstance(value, float):
        return value
    with numpy.errstate(over="ignore"):
        return float(numpy.float32(value))


_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


class TextField:
    """u32 length, UTF-8."""

    def put(self, values: Sequence[str]) -> Iterable[Bytes]:
        data = values[0].encode(errors="replace")  # lone surrogates, which host and file names may contain
        return _U32.pack(len(data)), data

    def take(self, source: Source) -> Sequence[Any]:
        (length,) = _U32.unpack(source.take(4))
        data = bytes(source.take(length))
        try:
            return (data.decode(),)
        except UnicodeDecodeError as error:
            raise WireError(Reason.BAD_TEXT, f"{data[:64]!r}: {error.reason}.") from None

    def span(self, data: Bytes | bytearray, at: int) -> int:
        return 4 + (_U32.unpack_from(data, at)[0] if at + 4 <= len(data) else 0)


class RawField:
    """A fixed number of raw bytes."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes

    def put(self, values: Sequence[bytes]) -> Iterable[Bytes]:
        if len(values[0]) != self.num_bytes:
            raise ValueError(f"{len(values[0])} bytes where {self.num_bytes} belong")
        return (values[0],)

    def take(self, source: Source) -> Sequence[Any]:
        return (bytes(source.take(self.num_bytes)),)

    def span(self, data: Bytes | bytearray, at: int) -> int:
        return self.num_bytes


class SizesField:
    """u32 count, u32s."""

    def put(self, values: Sequence[Sequence[int]]) -> Iterable[Bytes]:
        return (struct.pack(f"<I{len(values[0])}I", len(values[0]), *values[0]),)

    def take(self, source: Source) -> Sequence[Any]:
        (count,) = _U32.unpack(source.take(4))
        data = source.take(4 * count)
        return (struct.unpack(f"<{count}I", data),)

    def span(self, data: Bytes | bytearray, at: int) -> int:
        return 4 + (4 * _U32.unpack_from(data, at)[0] if at + 4 <= len(data) else 0)


class VectorField:
    """u64 count, float32s: streamed by a `FrameReader`."""

    def put(self, values: Sequence[FloatArray]) -> Iterable[Bytes]:
        array = numpy.ascontiguousarray(values[0], "<f4").reshape(-1)
        count = _U64.pack(array.size)
        return (count, array.data.cast("B")) if array.size else (count,)

    def take(self, source: Source) -> Sequence[Any]:
        (count,) = _U64.unpack(source.take(8))
        return (numpy.frombuffer(bytes(source.take(4 * count)), "<f4"),)

    def span(self, data: Bytes | bytearray, at: int) -> int:
        return 8


class RestField:
    """The rest of the frame: streamed by a `FrameReader`."""

    def put(self, values: Sequence[Bytes]) -> Iterable[Bytes]:
        data = memoryview(values[0])
        return (data.cast("B"),) if data.nbytes else ()

    def take(self, source: Source) -> Sequence[Any]:
        return (bytes(source.take(len(source.data) - source.at)),)

    def span(self, data: Bytes | bytearray, at: int) -> int:
        return 0


def _flag(value: int) -> bool:
    if value > 1:
        raise WireError(Reason.UNEXPECTED, f"{value} is neither yes (1) nor no (0).")
    return value == 1


def one_of(names: type[IntEnum], reason: Reason = Reason.UNEXPECTED) -> Number:
    """A byte that has a name."""
    known = {int(name): name for name in names}

    def convert(value: int) -> IntEnum:
        try:
            return known[value]
        except KeyError:
            raise WireError(reason, f"{names.__name__.lower()} {value} of {len(known)}.") from None

    return Number("B", convert)


U16: TypeAlias = Annotated[int, Number("H")]
U32: TypeAlias = Annotated[int, Number("I")]
U64: TypeAlias = Annotated[int, Number("Q")]
F32: TypeAlias = Annotated[float, Number("f")]
F64: TypeAlias = Annotated[float, Number("d")]
Flag: TypeAlias = Annotated[bool, Number("B", _flag)]
Text: TypeAlias = Annotated[str, TextField()]
Sizes: TypeAlias = Annotated[tuple[int, ...], SizesField()]
Vector: TypeAlias = Annotated[FloatArray, VectorField()]
Rest: TypeAlias = Annotated[Bytes, RestField()]


class VectorMessage:
    """A message with a vector: equal when its bytes are."""

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        layout = Layout(0, type(self))
        return b"".join(layout.put(self)) == b"".join(layout.put(other))


class Layout:
    """The layout of one message in its frame, after the tag; derived from the annotations of its class."""

    def __init__(self, tag: int, kind: type[Any]) -> None:
        hints = get_type_hints(kind, include_extras=True)
        named = [(field.name, hints[field.name].__metadata__[0]) for field in fields(kind)]
        self.tag, self.kind = tag, kind
        self.steps = _steps(named)
        streamed = [i for i, (_, step) in enumerate(self.steps) if isinstance(step, VectorField | RestField)]
        self.streamed = streamed[0] if streamed else None
        """Index of the step whose bytes are passed on as they arrive; None without one."""
        tail = self.steps[streamed[0] + 1 :] if streamed else ()
        self.tail_bytes = sum(step.span(b"", 0) for _, step in tail)
        """Bytes after a streamed vector: only numbers follow one."""
        self.no_tail = [0 for names, _ in tail for _ in names]

    def put(self, message: Any) -> list[Bytes]:
        """The frame's pieces after the tag."""
        return [piece for names, step in self.steps for piece in step.put([getattr(message, name) for name in names])]

    def take(self, source: Source) -> Any:
        """The message in these bytes, which must be used up."""
        values: list[Any] = []
        for _, step in self.steps:
            values += step.take(source)
        if source.at != len(source.data):
            raise WireError(Reason.TRAILING, f"{len(source.data) - source.at} bytes after {self.kind.__name__}.")
        return self.kind(*values)

    def head_bytes(self, held: Bytes | bytearray, at: int) -> int:
        """Where the streamed vector begins; a lower bound until that many bytes are held."""
        assert self.streamed is not None
        for _, step in self.steps[: self.streamed + 1]:
            at += step.span(held, at)
        return at

    def take_head(self, held: bytes) -> tuple[list[Any], int | None]:
        """The values before the streamed vector, and its number of elements if the frame contains it."""
        assert self.streamed is not None
        source, values = Source(memoryview(held), 1), list[Any]()
        for _, step in self.steps[: self.streamed]:
            values += step.take(source)
        return values, _U64.unpack(source.take(8))[0] if source.at < len(held) else None

    def with_tail(self, head: Any, held: bytes) -> Any:
        """The message with the values that follow its vector."""
        assert self.streamed is not None
        cut = self.streamed + 1
        source, values = (
            Source(memoryview(held)),
            [getattr(head, name) for names, _ in self.steps[:cut] for name in names],
        )
        for _, step in self.steps[cut:]:
            values += step.take(source)
        return self.kind(*values)


def _steps(named: Sequence[tuple[str, Any]]) -> tuple[tuple[tuple[str, ...], Step], ...]:
    steps: list[tuple[tuple[str, ...], Step]] = []
    run: list[tuple[str, Number]] = []
    for name, field in [*named, ("", None)]:
        if isinstance(field, Number):
            run.append((name, field))
            continue
        if run:
            steps.append((tuple(name for name, _ in run), Numbers([number for _, number in run])))
            run = []
        if field is not None:
            steps.append(((name,), field))
    return tuple(steps)
