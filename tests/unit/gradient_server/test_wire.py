"""The gradient server's wire: every message's bytes as the protocol's table has them, and every refusal."""

from __future__ import annotations

import contextlib
import copy
import math
import pickle
import struct
import zlib
from typing import Any

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.errors import Parallel3DError
from runtime.gradient_server.wire.messages import (
    LAYOUTS,
    MAX_CHUNK,
    MAX_FRAME,
    MAX_FRAME_V1,
    MAX_FRAME_V2,
    MAX_PARTS,
    MAX_SMALL,
    MAX_TABLE,
    REASONS,
    AveragedGradient,
    Beat,
    Chunk,
    Codec,
    Component,
    Dtype,
    GradientDone,
    GradientPayload,
    Hello,
    JoinRequest,
    Kind,
    Leave,
    Message,
    NonBlockGradientPayload,
    Part,
    Reason,
    Refused,
    Shutdown,
    Table,
    WireError,
    checksum,
    decode,
    encode,
    encode_parts,
    item_bytes,
    make_chunk,
    unpack,
)
from tests.support.wire_examples import GOLDEN, V1, V2, any_message, floats, named

BODIES = [bytes.fromhex(text)[4:] for _, text in GOLDEN]


def refusal(body: bytes) -> tuple[Reason, str]:
    with pytest.raises(WireError) as error:
        decode(body)
    return error.value.reason, error.value.detail


def test_every_message_has_its_bytes_written_here() -> None:
    assert {type(message) for message, _ in GOLDEN} == {layout.kind for layout in LAYOUTS.values()}
    assert sorted({bytes.fromhex(text)[4] for _, text in V1}) == [*range(0x01, 0x0C)]
    assert sorted({bytes.fromhex(text)[4] for _, text in V2}) == [*range(0x20, 0x2F)]


@pytest.mark.parametrize(("message", "text"), GOLDEN, ids=named)
def test_golden_bytes(message: Message, text: str) -> None:
    frame = bytes.fromhex(text)
    assert encode(message) == frame
    assert b"".join(encode_parts(message)) == frame
    assert int.from_bytes(frame[:4], "big") == len(frame) - 4
    assert decode(frame[4:]) == message
    assert decode(memoryview(frame)[4:]) == message


@pytest.mark.parametrize(("message", "text"), GOLDEN, ids=named)
def test_what_is_cut_off_at_any_byte_is_refused(message: Message, text: str) -> None:
    body = bytes.fromhex(text)[4:]
    is_chunk = isinstance(message, Chunk)  # its payload is all that is left: a FrameReader finds it too short
    for end in range(len(body) - (8 if is_chunk else 0)):
        assert refusal(body[:end])[0] == (Reason.TRUNCATED if end else Reason.EMPTY)


@pytest.mark.parametrize(("message", "text"), [case for case in GOLDEN if type(case[0]) is not Chunk], ids=named)
def test_bytes_after_the_end_are_refused(message: Message, text: str) -> None:
    reason, detail = refusal(bytes.fromhex(text)[4:] + b"\0")
    assert (reason, detail) == (Reason.TRAILING, f"1 bytes after {type(message).__name__}.")


@settings(deadline=None)
@given(st.data(), st.sampled_from([layout.kind for layout in LAYOUTS.values()]))
def test_round_trip(data: st.DataObject, kind: type[Any]) -> None:
    message = data.draw(any_message(kind))
    frame = encode(message)
    assert b"".join(encode_parts(message)) == frame
    arrived = decode(frame[4:])
    assert arrived == message
    assert encode(arrived) == frame


@settings(deadline=None, max_examples=1000)
@given(st.sampled_from([0, *range(0x0E), *range(0x1F, 0x31), 0xFF]), st.binary(max_size=80))
def test_any_bytes_are_a_message_or_are_refused(tag: int, rest: bytes) -> None:
    body = bytes([tag]) + rest
    with contextlib.suppress(WireError):
        assert encode(decode(body))[4:] == body, "one message, one way to write it"


@settings(deadline=None)
@given(st.sampled_from(BODIES), st.data())
def test_a_changed_byte_makes_another_message_or_none(body: bytes, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(body) - 1))
    changed = body[:at] + bytes([body[at] ^ data.draw(st.integers(1, 255))]) + body[at + 1 :]
    with contextlib.suppress(WireError):
        assert encode(decode(changed))[4:] == changed


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -0.0, 1e300])
def test_a_loss_may_be_anything(value: float) -> None:
    arrived = decode(encode(GradientDone(1, 0, value, 0, 0))[4:])
    assert isinstance(arrived, GradientDone)
    assert struct.pack("<d", arrived.loss) == struct.pack("<d", value)
    single = decode(encode(AveragedGradient(1, floats(), value))[4:])
    assert isinstance(single, AveragedGradient)
    with numpy.errstate(over="ignore"):
        assert struct.pack("<f", single.global_loss) == numpy.float32(value).tobytes()


def test_a_vector_keeps_every_bit() -> None:
    bits = numpy.array([0x7FC00001, 0xFF800000, 0x00000001, 0x80000000], "<u4")
    arrived = decode(encode(AveragedGradient(1, bits.view("<f4"), 0.0))[4:])
    assert isinstance(arrived, AveragedGradient)
    assert arrived.vector.view("<u4").tolist() == bits.tolist()
    assert arrived.vector.dtype == numpy.dtype("<f4")


def test_long_vectors_are_views_of_the_senders_memory() -> None:
    vector = numpy.zeros(1000, numpy.float32)
    head, middle, tail = encode_parts(GradientPayload(1, 0, vector, 0.0, 0, 0))
    vector[:] = 1.0
    assert isinstance(middle, memoryview)
    assert middle == vector.data.cast("B")
    assert (len(head), len(tail)) == (25, 20)
    payload = vector.data
    chunk = make_chunk(payload, count=1000, kind=Kind.AVERAGE, step=1, attempt=0, part=0, offset=0)
    assert chunk.payload is payload
    assert len(encode_parts(chunk)) == 2
    assert encode_parts(chunk)[1] == payload.cast("B")


def test_a_message_refers_to_nothing_of_what_it_was_read_from() -> None:
    memory = bytearray(encode(GradientPayload(1, 0, floats(1.0), 0.0, 0, 0))[4:])
    message = decode(memoryview(memory))
    chunk_memory = bytearray(BODIES[[type(m) for m, _ in GOLDEN].index(Chunk)])
    chunk = decode(memoryview(chunk_memory))
    memory[:] = bytes(len(memory))
    chunk_memory[:] = bytes(len(chunk_memory))
    assert isinstance(message, GradientPayload)
    assert message.vector.tolist() == [1.0]
    assert isinstance(chunk, Chunk)
    assert bytes(chunk.payload) == bytes.fromhex("0000803f000020c0")


def test_vectors_of_other_kinds_are_sent_as_float32() -> None:
    matrix = numpy.arange(6, dtype=numpy.float64).reshape(2, 3).T
    arrived = decode(encode(AveragedGradient(1, matrix, 0.0))[4:])  # type: ignore[arg-type]
    assert isinstance(arrived, AveragedGradient)
    assert arrived.vector.tolist() == [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]


def test_messages_with_vectors_are_equal_when_their_bytes_are() -> None:
    one = AveragedGradient(1, floats(math.nan), 0.0)
    assert one == AveragedGradient(1, floats(math.nan), 0.0)
    assert one != AveragedGradient(1, floats(1.0), 0.0)
    assert one != Shutdown()
    with pytest.raises(TypeError):
        hash(one)


@pytest.mark.parametrize(
    ("body", "reason", "detail"),
    [
        ("", Reason.EMPTY, ""),
        ("00", Reason.UNKNOWN_TAG, "0x00."),
        ("0c", Reason.UNKNOWN_TAG, "0x0c."),
        ("1f", Reason.UNKNOWN_TAG, "0x1f."),
        ("2f", Reason.UNKNOWN_TAG, "0x2f."),
        ("2d 02000000 c328", Reason.BAD_TEXT, "b'\\xc3(': invalid continuation byte."),
        ("2d 03000000 eda080", Reason.BAD_TEXT, "b'\\xed\\xa0\\x80': invalid continuation byte."),
        ("2d ffffffff", Reason.TRUNCATED, "4294967295 bytes from byte 5 of 5."),
        (
            "05 0000000000000000 ffffffffffffffff 00000000",
            Reason.TRUNCATED,
            "73786976294838206460 bytes from byte 17 of 21.",
        ),
        ("09 0000000000000000 00000000 ffffffff", Reason.TRUNCATED, "17179869180 bytes from byte 17 of 17."),
        ("0a 0000000000000000 00000000 03 0000000000000000", Reason.WRONG_COMPONENT, "component 3 of 3."),
        ("0b 0000000000000000 ff 0000000000000000", Reason.WRONG_COMPONENT, "component 255 of 3."),
        (
            "20 0200 00000000 " + "00" * 16 + " 0000000000000000 02",
            Reason.UNEXPECTED,
            "2 is neither yes (1) nor no (0).",
        ),
        ("23 00000000 00000000 " + "00" * 32 + " 00000000 00000000 00000000 02", Reason.UNEXPECTED, "codec 2 of 2."),
        ("27 03 0000000000000000 00000000 00000000", Reason.UNEXPECTED, "kind 3 of 3."),
        ("27 02 0000000000000000 00000000 01000000 0a 0000000000000000", Reason.BAD_DTYPE, "number 10, of 10."),
        (
            "27 00 0000000000000000 00000000 01000000 04 0000000000000000",
            Reason.BAD_DTYPE,
            "int64 in a table of gradients.",
        ),
        (
            "27 01 0000000000000000 00000000 01000000 07 0000000000000000",
            Reason.BAD_DTYPE,
            "bool in a table of averages.",
        ),
        ("27 02 0000000000000000 00000000 01000100", Reason.TOO_LONG, "a table of 65537 parts, of at most 65536."),
    ],
)
def test_refusals(body: str, reason: Reason, detail: str) -> None:
    assert refusal(bytes.fromhex(body)) == (reason, detail)


def test_limits() -> None:
    assert (MAX_FRAME_V1, MAX_CHUNK, MAX_FRAME_V2) == (100_000_000, 1 << 20, (1 << 20) + 4096)
    assert {tag for tag, most in MAX_FRAME.items() if most == MAX_FRAME_V1} == {0x04, 0x05, 0x08, 0x09, 0x0A, 0x0B}
    assert (MAX_FRAME[0x27], MAX_FRAME[0x28], MAX_FRAME[0x06]) == (MAX_TABLE, MAX_FRAME_V2, MAX_SMALL)
    largest = Leave("x" * (MAX_SMALL - 5))
    assert decode(encode(largest)[4:]) == largest
    with pytest.raises(
        WireError, match=r"^too_long: longer than is allowed: Leave of 65537 bytes, of at most 65536\.$"
    ):
        encode(Leave("x" * (MAX_SMALL - 4)))
    assert refusal(b"\x2d" + bytes(MAX_SMALL)) == (Reason.TOO_LONG, "Leave of 65537 bytes, of at most 65536.")
    table = Table(Kind.STATE, 1, 0, (Part(Dtype.FLOAT32, 1),) * MAX_PARTS)
    assert decode(encode(table)[4:]) == table


def test_a_version_1_frame_has_up_to_100_000_000_bytes() -> None:
    fits = (MAX_FRAME_V1 - 41) // 4  # 41: tag, step, worker, count, loss, correct, total
    parts = encode_parts(GradientPayload(1, 0, numpy.zeros(fits, numpy.float32), 0.0, 0, 0))
    assert sum(map(len, parts)) - 4 <= MAX_FRAME_V1
    with pytest.raises(WireError, match="too_long"):
        encode_parts(GradientPayload(1, 0, numpy.zeros(fits + 1, numpy.float32), 0.0, 0, 0))


def test_dtypes() -> None:
    sizes = {dtype.name.lower(): (int(dtype), dtype.num_bytes) for dtype in Dtype}
    assert sizes == {
        "float32": (0, 4),
        "float64": (1, 8),
        "float16": (2, 2),
        "bfloat16": (3, 2),
        "int64": (4, 8),
        "int32": (5, 4),
        "uint8": (6, 1),
        "bool": (7, 1),
        "int16": (8, 2),
        "int8": (9, 1),
    }
    for dtype in Dtype:
        if dtype is not Dtype.BFLOAT16:
            assert dtype.numpy == numpy.dtype(dtype.name.lower())


def test_text_that_is_no_text_is_sent_as_well_as_it_goes() -> None:
    assert decode(encode(Leave("host\udcff"))[4:]) == Leave("host?")


def test_what_is_no_such_field_is_our_own_mistake() -> None:
    with pytest.raises(ValueError, match="15 bytes where 16 belong"):
        encode(Hello(2, "n", bytes(15), 0, False))
    with pytest.raises(struct.error):
        encode(Beat(-1))
    with pytest.raises(struct.error):
        encode(JoinRequest("n", 2**32, ""))


def test_every_reason_can_be_said() -> None:
    assert {str(reason) for reason in Reason} == set(REASONS)
    error = WireError(Reason.OLD_STEP, "3, and 4 is being added up.")
    assert str(error) == "old_step: a step that is over: 3, and 4 is being added up."
    assert str(WireError(Reason.EMPTY)) == "empty: a frame of no bytes."
    assert isinstance(error, Parallel3DError)
    for arrived in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert (type(arrived), arrived.reason, arrived.detail) == (WireError, error.reason, error.detail)
    assert decode(encode(Refused(error.reason, error.detail))[4:]) == Refused("old_step", error.detail)


def test_components_have_their_numbers() -> None:
    assert [Component.LM_HEAD, Component.FINAL_NORM, Component.EMBEDDING] == [0, 1, 2]
    arrived = decode(encode(NonBlockGradientPayload(1, 0, Component.EMBEDDING, floats()))[4:])
    assert isinstance(arrived, NonBlockGradientPayload)
    assert arrived.component is Component.EMBEDDING


class TestChunks:
    """Packing, unpacking and its hard cap."""

    def make(self, data: bytes, count: int, codec: Codec) -> Chunk:
        view = memoryview(data)
        return make_chunk(view, count=count, kind=Kind.STATE, step=1, attempt=2, part=3, offset=4, codec=codec)

    def test_what_packs_well_is_packed(self) -> None:
        data = bytes(4000)
        chunk = self.make(data, 1000, Codec.ZLIB)
        assert (chunk.codec, chunk.count, chunk.checksum) == (Codec.ZLIB, 1000, checksum(data))
        assert len(chunk.payload) < 100
        assert unpack(chunk.payload, chunk.count) == data

    def test_what_does_not_is_sent_as_it_is(self) -> None:
        data = numpy.random.default_rng(0).bytes(4000)
        chunk = self.make(data, 1000, Codec.ZLIB)
        assert (chunk.codec, bytes(chunk.payload)) == (Codec.NONE, data)

    @settings(deadline=None)
    @given(st.binary(max_size=2000), st.sampled_from([1, 2, 4, 8]))
    def test_unpacked_it_is_the_same(self, data: bytes, size: int) -> None:
        data = data * size
        chunk = self.make(data, len(data) // size, Codec.ZLIB)
        found = unpack(chunk.payload, chunk.count) if chunk.codec is Codec.ZLIB else bytes(chunk.payload)
        assert found == data
        assert chunk.checksum == checksum(found)

    @pytest.mark.parametrize(("num_bytes", "count"), [(9, 1), (1 << 26, 100), (1, 0), ((1 << 20) + 1, 1 << 20)])
    def test_a_bomb_is_stopped_at_the_cap(self, num_bytes: int, count: int) -> None:
        with pytest.raises(WireError) as error:
            unpack(zlib.compress(bytes(num_bytes)), count)
        assert error.value.reason is Reason.UNPACKS_TOO_FAR

    def test_what_is_no_zlib_is_refused(self) -> None:
        packed = zlib.compress(bytes(100))
        for wrong, reason in [
            (b"nothing of the sort", Reason.BAD_CHECKSUM),
            (packed[:-1] + b"\2", Reason.BAD_CHECKSUM),
            (packed[:-1], Reason.TRUNCATED),
            (b"", Reason.TRUNCATED),
            (packed + b"more", Reason.TRAILING),
        ]:
            with pytest.raises(WireError) as error:
                unpack(wrong, 100)
            assert error.value.reason is reason

    def test_elements_have_one_of_four_sizes(self) -> None:
        assert [item_bytes(10, 10 * size) for size in (1, 2, 4, 8)] == [1, 2, 4, 8]
        assert item_bytes(0, 0) == 0
        for count, num_bytes in [(10, 30), (10, 41), (0, 4), (10, 0), (10, 160)]:
            with pytest.raises(WireError) as error:
                item_bytes(count, num_bytes)
            assert error.value.reason is Reason.WRONG_LENGTH
        with pytest.raises(WireError) as error:
            item_bytes(1 << 20, 2 << 20)
        assert error.value.reason is Reason.TOO_LONG
