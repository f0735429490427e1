"""The frame reader: however the bytes are cut the same comes out, and whatever comes it holds next to nothing."""

from __future__ import annotations

import contextlib
import random
import tracemalloc
import zlib
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.gradient_server.wire.frames import FrameReader, Item, Side, VectorBegins, VectorEnds, VectorPiece
from runtime.gradient_server.wire.messages import (
    LAYOUTS,
    MAX_CHUNK,
    MAX_FRAME_V1,
    MAX_FRAME_V2,
    MAX_PARTS,
    MAX_SMALL,
    AveragedBlockGradient,
    AveragedGradient,
    AveragedNonBlockGradient,
    Beat,
    BlockGradientPayload,
    Chunk,
    Codec,
    Component,
    Dtype,
    GradientDone,
    GradientPayload,
    Heartbeat,
    Hello,
    JoinRequest,
    Kind,
    Leave,
    Message,
    NonBlockGradientPayload,
    Part,
    Proof,
    Reason,
    Shutdown,
    StateDone,
    Table,
    WireError,
    encode,
    encode_parts,
    make_chunk,
)
from tests.support.wire_examples import GOLDEN, floats, named

HELLO = Hello(2, "n1", bytes(16), 0, False)


JOINS = ("JoinRequest", "JoinAccepted", "Hello", "Challenge", "Proof", "Welcome")


def after_join(version: int, side: Side = Side.SERVER) -> FrameReader:
    reader = FrameReader(side)
    reader.joined(version)
    return reader


def chunk_of(data: bytes, size: int, codec: Codec = Codec.NONE, **fields: Any) -> Chunk:
    where = {"kind": Kind.GRADIENT, "step": 7, "attempt": 1, "part": 2, "offset": 64} | fields
    return make_chunk(memoryview(data), count=len(data) // size, codec=codec, **where)


def put_together(items: Iterable[Item]) -> list[Any]:
    """Vectors and chunks whole again; that pieces are whole elements, one after the other, is looked at here."""
    found: list[Any] = []
    begun: VectorBegins | None = None
    data = b""
    for item in items:
        if isinstance(item, VectorBegins):
            assert begun is None
            begun, data = item, b""
        elif isinstance(item, VectorPiece):
            assert begun is not None
            assert item.offset_bytes == len(data)
            assert len(item.data) > 0
            assert len(item.data) % begun.item_bytes == 0
            data += item.data
        elif isinstance(item, VectorEnds):
            assert begun is not None
            assert len(data) == begun.num_bytes == begun.count * begun.item_bytes
            found.append(whole(item.message, data))
            begun = None
        else:
            assert begun is None
            found.append(item)
    return found


def whole(message: Any, data: bytes) -> Any:
    if isinstance(message, Chunk):
        return replace(message, codec=Codec.NONE, payload=data)
    return replace(message, vector=numpy.frombuffer(data, "<f4"))


def unpacked(message: Message) -> Message:
    if isinstance(message, Chunk) and message.codec is Codec.ZLIB:
        return replace(message, codec=Codec.NONE, payload=zlib.decompress(message.payload))
    return message


def refusal(reader: FrameReader, data: bytes) -> Reason:
    with pytest.raises(WireError) as error:
        list(reader.feed(data))
    with pytest.raises(WireError) as again:
        list(reader.feed(b"\0"))
    assert again.value.args == error.value.args, "it stays broken"
    return error.value.reason


V1_TO_SERVER: list[Message] = [
    GradientPayload(7, 1, floats(1.0, -2.5, 3.25), 0.5, 3, 16),
    GradientPayload(7, 1, floats(), 0.5, 3, 16),
    Heartbeat("n1", 5),
    BlockGradientPayload(7, 1, 11, 12, (2, 1), floats(1.0, 0.0, -1.0)),
    BlockGradientPayload(7, 1, 11, 12, (), floats()),
    NonBlockGradientPayload(7, 1, Component.EMBEDDING, floats(1.0, 2.0)),
    NonBlockGradientPayload(7, 1, Component.LM_HEAD, floats()),
    Shutdown(),
]
V1_TO_WORKER: list[Message] = [
    AveragedGradient(7, floats(1.0, 2.0), 0.25),
    AveragedGradient(7, floats(), 0.25),
    AveragedBlockGradient(7, 11, (3,), floats(1.0, 0.0, -1.0)),
    AveragedNonBlockGradient(7, Component.FINAL_NORM, floats(1.0)),
    AveragedNonBlockGradient(7, Component.FINAL_NORM, floats()),
    Shutdown(),
]
V2_TO_SERVER: list[Message] = [
    Table(Kind.GRADIENT, 7, 1, (Part(Dtype.FLOAT32, 5),)),
    *(chunk_of(bytes(range(3 * size)), size) for size in (1, 2, 4, 8)),
    chunk_of(bytes(400), 4, Codec.ZLIB),
    chunk_of(b"", 4),
    GradientDone(7, 1, 0.5, 3, 16),
    Beat(3),
    StateDone(7, 2),
    Leave("done"),
]


@pytest.mark.parametrize(
    ("side", "version", "messages"),
    [(Side.SERVER, 1, V1_TO_SERVER), (Side.WORKER, 1, V1_TO_WORKER), (Side.SERVER, 2, V2_TO_SERVER)],
    ids=["v1 to server", "v1 to worker", "v2 to server"],
)
class TestSplits:
    """The same items, whatever `recv` brought at a time."""

    @settings(deadline=None)
    @given(st.data())
    def test_any_split(self, side: Side, version: int, messages: list[Message], data: st.DataObject) -> None:
        sent = data.draw(st.lists(st.sampled_from(messages), min_size=1, max_size=6))
        stream = b"".join(map(encode, sent))
        cuts = sorted(data.draw(st.sets(st.integers(0, len(stream)), max_size=20)))
        reader = after_join(version, side)
        found = []
        for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
            found += put_pieces_by(reader.feed(stream[begin:end]))
        assert put_together(found) == [unpacked(message) for message in sent]
        assert not reader.is_mid_frame

    def test_byte_by_byte(self, side: Side, version: int, messages: list[Message]) -> None:
        stream = b"".join(map(encode, messages))
        reader = after_join(version, side)
        found: list[Item] = []
        for byte in stream:
            found += put_pieces_by(reader.feed(bytes([byte])))
        assert put_together(found) == [unpacked(message) for message in messages]

    def test_the_end_at_any_byte_is_in_the_midst_of_a_frame(
        self, side: Side, version: int, messages: list[Message]
    ) -> None:
        for message in messages:
            frame = encode(message)
            for end in range(len(frame)):
                reader = after_join(version, side)
                items = list(reader.feed(frame[:end]))
                assert not [item for item in items if not isinstance(item, VectorBegins | VectorPiece)]
                assert reader.is_mid_frame == (end > 0)

    def test_a_frame_that_is_too_short_for_its_message_is_refused(
        self, side: Side, version: int, messages: list[Message]
    ) -> None:
        for message in messages:
            body = encode(message)[4:]
            for end in range(1, len(body)):
                frame = end.to_bytes(4, "big") + body[:end]
                reason = refusal(after_join(version, side), frame)
                if isinstance(message, Chunk) and end >= 39:  # the payload is what is short
                    assert reason in (Reason.WRONG_LENGTH, Reason.BAD_CHECKSUM, Reason.TRUNCATED)
                else:
                    assert reason is Reason.TRUNCATED

    def test_a_frame_that_is_too_long_for_its_message_is_refused(
        self, side: Side, version: int, messages: list[Message]
    ) -> None:
        for message in messages:
            body = encode(message)[4:] + b"\0"
            reason = refusal(after_join(version, side), len(body).to_bytes(4, "big") + body)
            if isinstance(message, Chunk) and message.codec is Codec.NONE:
                assert reason in (Reason.WRONG_LENGTH, Reason.BAD_CHECKSUM)
            else:
                assert reason is Reason.TRAILING


def put_pieces_by(items: Iterable[Item]) -> list[Item]:
    """What a consumer does who keeps them: a piece's memory is used again."""
    return [
        VectorPiece(item.offset_bytes, memoryview(bytes(item.data))) if isinstance(item, VectorPiece) else item
        for item in items
    ]


@pytest.mark.parametrize(("message", "text"), GOLDEN, ids=named)
def test_every_message_is_taken_by_a_side(message: Message, text: str) -> None:
    frame, taken = bytes.fromhex(text), []
    for side in Side:
        reader = FrameReader(side)
        if type(message).__name__ not in JOINS:
            reader.joined(1 if frame[4] < 0x20 else 2)
        with contextlib.suppress(WireError):
            taken.append(put_together(put_pieces_by(reader.feed(frame))))
    assert [message] in taken


def test_a_vector_comes_in_place() -> None:
    """No byte of it is copied but those of an element that is split."""
    vector = numpy.arange(1000, dtype="<f4")
    frame = memoryview(bytearray(encode(GradientPayload(7, 1, vector, 0.5, 3, 16))))
    begins, piece, ends = after_join(1).feed(frame)
    assert begins == VectorBegins(GradientPayload(7, 1, floats(), 0.0, 0, 0), 1000, 4000, 4)
    assert isinstance(piece, VectorPiece)
    frame[25:29] = floats(5.0).tobytes()
    assert numpy.frombuffer(piece.data, "<f4")[0] == 5.0
    assert ends == VectorEnds(GradientPayload(7, 1, floats(), 0.5, 3, 16))


def test_a_split_element_is_carried_over() -> None:
    frame = encode(AveragedGradient(7, floats(1.0, 2.0, 3.0), 0.25))
    reader = after_join(1, Side.WORKER)
    (begins,) = reader.feed(frame[:21])
    assert isinstance(begins, VectorBegins)
    found = []
    for begin, end in [(21, 23), (23, 24), (24, 30), (30, 33)]:
        pieces = put_pieces_by(reader.feed(frame[begin:end]))
        found.append([(item.offset_bytes, bytes(item.data)) for item in pieces if isinstance(item, VectorPiece)])
    one, two, three = (floats(value).tobytes() for value in (1.0, 2.0, 3.0))
    assert found == [[], [], [(0, one), (4, two)], [(8, three)]]


def test_a_split_element_can_be_fed_again_in_front_of_its_rest() -> None:
    frame = encode(AveragedGradient(7, floats(1.0, 2.0, 3.0), 0.25))
    reader = after_join(1, Side.WORKER)
    put_pieces_by(reader.feed(frame[:27]))
    assert (reader.num_split, reader.num_wanted) == (2, 6 + 4 + 21), "the vector, its tail, and a head like this one's"
    split = reader.take_split()
    assert (split, reader.num_split) == (frame[25:27], 0)
    (piece,) = reader.feed(split + frame[27:33])
    assert isinstance(piece, VectorPiece)
    assert (piece.offset_bytes, bytes(piece.data)) == (4, floats(2.0, 3.0).tobytes())


@pytest.mark.parametrize("codec", Codec)
@pytest.mark.parametrize("fed_at_once", [1, 7, 30, 4096])
def test_a_vector_is_received_where_its_taker_wants_it(codec: Codec, fed_at_once: int) -> None:
    """Bytes that came together with its head are copied there, all others are written there by whoever reads them;
    of what is packed none are, as it is held first."""
    sent = [bytes(range(250)) * 8, b"", bytes(250) * 8]
    frames = b"".join(encode(chunk_of(data, 4, codec)) for data in sent)
    reader, targets, ended, at = after_join(2), [bytearray(len(data)) for data in sent], [], 0
    while at < len(frames):
        room = reader.room
        if room is not None:
            num = min(len(room), 3 * fed_at_once, len(frames) - at)
            room[:num] = frames[at : at + num]
            items = reader.wrote(num)
        else:
            num = min(fed_at_once, len(frames) - at)
            items = reader.feed(frames[at : at + num])
        at += num
        for item in items:
            assert not isinstance(item, VectorPiece)
            if isinstance(item, VectorBegins):
                reader.receive_into(memoryview(targets[len(ended)]))
            else:
                ended.append(item)
    assert [bytes(target) for target in targets] == sent
    assert [type(item) for item in ended] == [VectorEnds] * 3
    assert not reader.is_mid_frame


def test_a_checksum_counts_for_what_was_received_in_place_too() -> None:
    frame = encode(chunk_of(bytes(range(200)), 4))
    reader, target = after_join(2), bytearray(200)
    for item in reader.feed(frame[:-150]):
        assert isinstance(item, VectorBegins)
        reader.receive_into(memoryview(target))
    assert reader.room is not None
    reader.room[:] = bytes(150)
    with pytest.raises(WireError) as caught:
        list(reader.wrote(150))
    assert caught.value.reason is Reason.BAD_CHECKSUM
    assert reader.room is None
    with pytest.raises(WireError):
        list(reader.feed(frame))


class TestWhoMaySayWhat:
    """Before the join only joins; after it only what this side is told, of the version that was joined."""

    def test_before_the_join(self) -> None:
        for message, _ in GOLDEN:
            for side, taken in [
                (Side.SERVER, {"JoinRequest", "Hello", "Proof"}),
                (Side.WORKER, {"JoinAccepted", "Shutdown", "Challenge", "Welcome", "Refused", "Leave"}),
            ]:
                reader = FrameReader(side)
                if type(message).__name__ in taken:
                    assert list(reader.feed(encode(message))) == [message]
                else:
                    assert refusal(reader, encode(message)) is Reason.NOT_JOINED

    def test_a_version_that_is_not_wanted(self) -> None:
        assert refusal(FrameReader(versions=(2,)), encode(JoinRequest("n", 1, "cpu"))) is Reason.VERSION_REFUSED
        assert refusal(FrameReader(versions=(1,)), encode(HELLO)) is Reason.VERSION_REFUSED
        assert list(FrameReader(versions=(2,)).feed(encode(HELLO))) == [HELLO]

    def test_joining_again(self) -> None:
        for message in (JoinRequest("n", 1, "cpu"), HELLO, Proof(bytes(32))):
            assert refusal(after_join(1), encode(message)) is Reason.ALREADY_JOINED
            assert refusal(after_join(2), encode(message)) is Reason.ALREADY_JOINED

    def test_the_other_version_and_the_other_side(self) -> None:
        assert refusal(after_join(1), encode(Beat(0))) is Reason.UNEXPECTED
        assert refusal(after_join(2), encode(Shutdown())) is Reason.UNEXPECTED
        assert refusal(after_join(1), encode(AveragedGradient(1, floats(), 0.0))) is Reason.UNEXPECTED
        assert refusal(after_join(2, Side.WORKER), encode(GradientDone(1, 0, 0.0, 0, 0))) is Reason.UNEXPECTED

    def test_a_join_counts_for_the_very_next_frame(self) -> None:
        reader = FrameReader()
        found = []
        for item in reader.feed(encode(HELLO) + encode(Beat(1))):
            found.append(item)
            reader.joined(2)
        assert found == [HELLO, Beat(1)]
        assert reader.version == 2


class TestLengths:
    """Length 0, lengths over the limits, and other protocols."""

    def test_nothing(self) -> None:
        assert refusal(FrameReader(), bytes(4)) is Reason.EMPTY
        assert refusal(after_join(2), encode(Beat(1)) + bytes(4)) is Reason.EMPTY

    def test_everything(self) -> None:
        assert refusal(FrameReader(), b"\xff" * 4) is Reason.NOT_A_FRAME
        assert refusal(after_join(2), encode(Beat(1)) + b"\xff" * 4) is Reason.TOO_LONG

    def test_limits_before_the_join(self) -> None:
        longest = JoinRequest("x" * (MAX_SMALL - 13), 1, "")
        assert list(FrameReader().feed(encode(longest))) == [longest]
        for length in (MAX_SMALL + 1, MAX_FRAME_V1):
            assert refusal(FrameReader(), length.to_bytes(4, "big")) is Reason.TOO_LONG
        assert refusal(FrameReader(), (MAX_FRAME_V1 + 1).to_bytes(4, "big")) is Reason.NOT_A_FRAME

    def test_limits_after_the_join(self) -> None:
        for version, length in [(1, MAX_FRAME_V1 + 1), (2, MAX_FRAME_V2 + 1)]:
            first = encode(Shutdown() if version == 1 else Beat(1))
            assert refusal(after_join(version), first + length.to_bytes(4, "big")) is Reason.TOO_LONG
        for tag in (0x06, 0x07):
            head = (MAX_SMALL + 1).to_bytes(4, "big") + bytes([tag])
            assert refusal(after_join(1), head) is Reason.TOO_LONG

    def test_a_limit_of_ones_own(self) -> None:
        reader = FrameReader(max_frame=1000)
        reader.joined(1)
        assert refusal(reader, (1001).to_bytes(4, "big") + b"\x04") is Reason.TOO_LONG

    def test_too_many_sizes_before_a_vector(self) -> None:
        sizes = tuple(range(20_000))
        frame = encode(BlockGradientPayload(7, 1, 0, 1, sizes, floats(1.0)))
        assert refusal(after_join(1), frame) is Reason.TOO_LONG
        fits = BlockGradientPayload(7, 1, 0, 1, sizes[:16_000], floats(1.0))
        assert put_together(put_pieces_by(after_join(1).feed(encode(fits)))) == [fits]

    def test_a_vector_that_says_more_than_its_frame_holds(self) -> None:
        body = bytearray(encode(GradientPayload(7, 1, floats(1.0), 0.0, 0, 0)))
        for count, reason in [(0, Reason.TRAILING), (2, Reason.TRUNCATED), (2**64 - 1, Reason.TRUNCATED)]:
            body[17:25] = count.to_bytes(8, "little")
            assert refusal(after_join(1), bytes(body)) is reason

    @pytest.mark.parametrize(
        "data",
        [
            b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
            b"POST /metrics HTTP/1.1\r\n\r\n",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            bytes.fromhex("16030102000100fc0303"),
            bytes.fromhex("15030100020228"),
            b"SSH-2.0-OpenSSH_9.6\r\n",
            b"\x80\x2e\x01\x00\x02",
            b"hello there\n",
        ],
        ids=repr,
    )
    def test_other_protocols(self, data: bytes) -> None:
        assert refusal(FrameReader(), data) is Reason.NOT_A_FRAME
        assert refusal(FrameReader(), data[:4]) is Reason.NOT_A_FRAME, "at once, not when more has come"

    def test_half_a_header_then_silence(self) -> None:
        reader = FrameReader()
        assert not reader.is_mid_frame
        assert list(reader.feed(b"\0\0")) == []
        assert reader.is_mid_frame
        assert list(reader.feed(b"")) == []

    def test_noise(self) -> None:
        noise = random.Random(7)
        for _ in range(2000):
            reader = FrameReader(noise.choice(list(Side)))
            assert refusal(reader, noise.randbytes(70_000 if noise.random() < 0.01 else 64)) in Reason


class TestChunks:
    """Checksums, and packed ones."""

    def test_a_wrong_checksum(self) -> None:
        for codec in Codec:
            chunk = chunk_of(bytes(400), 4, codec)
            assert chunk.codec is codec
            wrong = encode(replace(chunk, checksum=chunk.checksum ^ 1))
            assert refusal(after_join(2), wrong) is Reason.BAD_CHECKSUM

    def test_any_changed_bit_of_the_payload_is_found(self) -> None:
        frame = bytearray(encode(chunk_of(bytes(range(16)), 4)))
        for at in range(len(frame) - 16, len(frame)):
            for bit in range(8):
                frame[at] ^= 1 << bit
                assert refusal(after_join(2), bytes(frame)) is Reason.BAD_CHECKSUM
                frame[at] ^= 1 << bit

    def test_pieces_came_before_the_checksum_was_found_wrong(self) -> None:
        chunk = chunk_of(bytes(400), 4)
        found: list[Item] = []
        with pytest.raises(WireError):
            found.extend(after_join(2).feed(encode(replace(chunk, checksum=0))))
        assert [type(item) for item in found] == [VectorBegins, VectorPiece]

    def test_the_largest(self) -> None:
        for size in (1, 2, 4, 8):
            chunk = chunk_of(bytes(MAX_CHUNK), size)
            assert put_together(after_join(2).feed(encode(chunk))) == [chunk]
        too_long = chunk_of(bytes(MAX_CHUNK + 8), 8)
        assert refusal(after_join(2), encode(too_long)) is Reason.TOO_LONG
        packed = replace(chunk_of(bytes(4), 4), codec=Codec.ZLIB, payload=bytes(MAX_CHUNK + 1))
        assert refusal(after_join(2), encode(packed)) is Reason.TOO_LONG

    def test_elements_of_no_size(self) -> None:
        chunk = chunk_of(bytes(12), 4)
        for count in (0, 2, 5, 13, 2**32 - 1):
            assert refusal(after_join(2), encode(replace(chunk, count=count))) is Reason.WRONG_LENGTH

    def test_a_bomb(self) -> None:
        bomb = zlib.compress(bytes(1 << 27))
        assert len(bomb) < MAX_CHUNK
        for count in (1, 1 << 17, 2**32 - 1):
            frame = encode(replace(chunk_of(bytes(4), 4), codec=Codec.ZLIB, count=count, payload=bomb))
            tracemalloc.start()
            assert refusal(after_join(2), frame) is Reason.UNPACKS_TOO_FAR
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert peak < 8 << 20

    def test_packed_it_must_be_as_many_as_it_says(self) -> None:
        chunk = chunk_of(bytes(400), 4, Codec.ZLIB)
        for count, reason in [
            (99, Reason.WRONG_LENGTH),
            (49, Reason.UNPACKS_TOO_FAR),
            (0, Reason.UNPACKS_TOO_FAR),
            (101, Reason.WRONG_LENGTH),
            (401, Reason.WRONG_LENGTH),
        ]:
            assert refusal(after_join(2), encode(replace(chunk, count=count))) is reason


class TestMemory:
    """Nothing that comes is held, but what must be whole."""

    def traced(self, feed: Any) -> int:
        tracemalloc.start()
        try:
            feed()
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    def test_a_vector_of_100_mb(self) -> None:
        count = (MAX_FRAME_V1 - 41) // 4
        head, vector, tail = encode_parts(GradientPayload(7, 1, numpy.zeros(count, "<f4"), 0.5, 3, 16))
        received = memoryview(bytearray((1 << 20) - 3))
        reader = after_join(1)
        seen = {"pieces": 0, "ends": 0}

        def feed() -> None:
            for data in (head, *(vector[at : at + len(received)] for at in range(0, len(vector), len(received))), tail):
                received[: len(data)] = data
                for item in reader.feed(received[: len(data)]):
                    seen["pieces"] += isinstance(item, VectorPiece)
                    seen["ends"] += isinstance(item, VectorEnds)

        assert self.traced(feed) < 64 * 1024
        assert seen["ends"] == 1
        assert seen["pieces"] <= 2 * (96 + 2)

    def test_many_chunks(self) -> None:
        frame = encode(chunk_of(bytes(MAX_CHUNK), 4))
        reader = after_join(2)

        def feed() -> None:
            for _ in range(20):
                for at in range(0, len(frame), 100_001):
                    for _ in reader.feed(memoryview(frame)[at : at + 100_001]):
                        pass

        assert self.traced(feed) < 64 * 1024

    def test_an_idle_reader(self) -> None:
        table = encode(Table(Kind.GRADIENT, 7, 1, (Part(Dtype.FLOAT32, 5),) * MAX_PARTS))
        tracemalloc.start()
        readers = []
        for number in range(100):
            reader = after_join(2)
            for _ in reader.feed(table if number == 0 else encode(Beat(1))):
                pass
            readers.append(reader)
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert held / len(readers) < 4096

    def test_a_reader_that_broke_holds_nothing(self) -> None:
        reader = FrameReader()
        list(reader.feed(encode(JoinRequest("x" * 60_000, 1, ""))[:50_000]))
        assert len(reader._held) > 40_000
        body = b"\x01" + b"\xff" * 60_000
        reader = FrameReader()
        refusal(reader, len(body).to_bytes(4, "big") + body)
        assert len(reader._held) == 0

    def test_a_long_frame_is_held_only_as_far_as_it_came(self) -> None:
        reader = after_join(2)
        list(reader.feed((1_000_000).to_bytes(4, "big") + b"\x27" + bytes(1000)))
        assert len(reader._held) == 1001


def mutated(noise: random.Random, frames: list[bytes]) -> bytes:
    """A frame, and something wrong with it. Or not."""
    frame = bytearray(noise.choice(frames))
    match noise.randrange(8):
        case 0:
            return bytes(frame)
        case 1:
            frame[noise.randrange(4, len(frame))] ^= 1 << noise.randrange(8)
        case 2:
            del frame[noise.randrange(4, len(frame)) :]
            frame[:4] = (len(frame) - 4).to_bytes(4, "big")
        case 3:
            frame += noise.randbytes(noise.randrange(1, 20))
            frame[:4] = (len(frame) - 4).to_bytes(4, "big")
        case 4:
            frame[:4] = noise.choice([0, 1, 0xFFFF, 0x10001, MAX_FRAME_V1, 2**32 - 1, noise.getrandbits(32)]).to_bytes(
                4, "big"
            )
        case 5:
            frame[4] = noise.randrange(256)
        case 6:
            body = bytes([noise.choice([*LAYOUTS])]) + noise.randbytes(noise.choice([0, 8, 30, 60, 3000]))
            return len(body).to_bytes(4, "big") + body
        case 7:
            at = noise.randrange(4, len(frame))
            frame[at : at + 8] = noise.choice([b"\xff" * 8, bytes(8), noise.randbytes(8)])
    return bytes(frame)


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


BATCH = 100


def fuzz(seed: int, counted: dict[str, int]) -> None:
    """A batch of frames; each to a reader that is in some state."""
    noise = random.Random(seed)
    frames = [encode(message) for message, _ in GOLDEN] + [encode(chunk_of(bytes(4000), 4, Codec.ZLIB))]
    for _ in range(BATCH):
        reader = FrameReader(noise.choice(list(Side)), versions=noise.choice([(1,), (2,), (1, 2)]))
        if noise.random() < 0.8:
            reader.joined(noise.choice([1, 2]))
        data = mutated(noise, frames)
        cut = noise.randrange(len(data))
        try:
            for part in (data[:cut], data[cut:]):
                for _ in reader.feed(part):
                    pass
            outcome = "unfinished" if reader.is_mid_frame else "taken"
        except WireError as error:
            outcome = error.reason
        counted[outcome] = counted.get(outcome, 0) + 1


def test_100_000_generated_frames() -> None:
    """Nothing but WireError is raised, each is counted by its reason, and memory does not grow."""
    counted: dict[str, int] = {}
    before = resident_bytes()

    @settings(max_examples=1000, deadline=None, database=None)
    @given(st.integers(0, 2**64 - 1))
    def feed(seed: int) -> None:
        fuzz(seed, counted)

    feed()
    assert resident_bytes() - before < 64 << 20
    assert sum(counted.values()) >= 1000 * BATCH
    expected = {
        "taken",
        "unfinished",
        Reason.TOO_LONG,
        Reason.EMPTY,
        Reason.TRUNCATED,
        Reason.TRAILING,
        Reason.UNKNOWN_TAG,
        Reason.BAD_TEXT,
        Reason.BAD_DTYPE,
        Reason.BAD_CHECKSUM,
        Reason.NOT_A_FRAME,
        Reason.NOT_JOINED,
        Reason.ALREADY_JOINED,
        Reason.VERSION_REFUSED,
        Reason.WRONG_COMPONENT,
        Reason.WRONG_LENGTH,
        Reason.UNEXPECTED,
    }
    assert expected <= set(counted)
