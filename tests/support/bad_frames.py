"""Bytes that a gradient server should never be sent, any number of them, and why it refuses each."""

from __future__ import annotations

import random
from collections.abc import Iterator

from hypothesis import strategies as st

from runtime.gradient_server.wire.auth import SeenNonces, ServerHandshake, check_node_id
from runtime.gradient_server.wire.frames import FrameReader, Side
from runtime.gradient_server.wire.messages import LAYOUTS, Hello, JoinRequest, Proof, Reason, WireError, encode
from tests.support.wire_examples import GOLDEN

_GOOD = [encode(message) for message, _ in GOLDEN]
_LENGTHS = (0, 1, 2, 5, 64 << 10, (64 << 10) + 1, 1 << 20, 99_999_999, 100_000_001, 2**31, 2**32 - 1)
HTTP = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nUser-Agent: curl/8.5.0\r\nAccept: */*\r\n\r\n"


def frames(seed: int) -> Iterator[bytes]:
    """Of all kinds: good ones at the wrong time, cut, altered and joined ones, noise, and other protocols."""
    chance = random.Random(seed)
    makers = (_good, _cut, _altered, _wrong_length, _noise, _noise_in_a_frame, _several, _deep_text)
    while True:
        yield chance.choice(makers)(chance)


@st.composite
def drawn(draw: st.DrawFn) -> bytes:
    """The same kinds, drawn by hypothesis, which makes a failing one small."""
    frame = draw(st.sampled_from(_GOOD))
    match draw(st.sampled_from(("good", "cut", "cut body", "altered", "length", "body", "noise", "two"))):
        case "cut":
            return frame[: draw(st.integers(0, len(frame)))]
        case "cut body":
            body = frame[4 : draw(st.integers(4, len(frame)))]
            return len(body).to_bytes(4, "big") + body
        case "altered":
            at, put = draw(st.integers(0, len(frame) - 1)), draw(st.binary(min_size=1, max_size=8))
            return frame[:at] + put + frame[at + len(put) :]
        case "length":
            length = draw(st.sampled_from(_LENGTHS) | st.integers(0, 2**32 - 1))
            return length.to_bytes(4, "big") + frame[4:]
        case "body":
            body = bytes([draw(st.sampled_from(sorted(LAYOUTS)))]) + draw(st.binary(max_size=80))
            return len(body).to_bytes(4, "big") + body
        case "noise":
            return draw(st.sampled_from((HTTP, client_hello(random.Random(1)))) | st.binary(min_size=1, max_size=300))
        case "two":
            return frame + draw(st.sampled_from(_GOOD))
    return frame


def why_refused(data: bytes) -> Reason | None:
    """What the server says of a connection that begins with this, in a run of version 2. None: nothing, if it ends."""
    reader, handshake = FrameReader(Side.SERVER), ServerHandshake(b"another token", SeenNonces())
    try:
        for item in reader.feed(data):
            match item:
                case Hello():
                    handshake.challenge(item)
                case Proof():
                    handshake.check(item)
                case JoinRequest():
                    check_node_id(item.node_id)
                    return Reason.VERSION_REFUSED
    except WireError as error:
        return error.reason
    return None


def _good(chance: random.Random) -> bytes:
    return chance.choice(_GOOD)


def _cut(chance: random.Random) -> bytes:
    frame = _good(chance)
    return frame[: chance.randrange(len(frame))]


def _altered(chance: random.Random) -> bytes:
    frame = bytearray(_good(chance))
    for _ in range(chance.randint(1, 4)):
        frame[chance.randrange(len(frame))] = chance.randrange(256)
    return bytes(frame)


def _wrong_length(chance: random.Random) -> bytes:
    return chance.choice(_LENGTHS).to_bytes(4, "big") + _good(chance)[4:]


def _noise(chance: random.Random) -> bytes:
    return chance.choice((HTTP, client_hello(chance), chance.randbytes(chance.randrange(1, 300))))


def _noise_in_a_frame(chance: random.Random) -> bytes:
    tag = chance.choice([*LAYOUTS, chance.randrange(256)])
    body = bytes([tag]) + chance.randbytes(chance.randrange(100))
    return len(body).to_bytes(4, "big") + body


def _several(chance: random.Random) -> bytes:
    return b"".join(chance.choice((_good, _altered, _noise_in_a_frame))(chance) for _ in range(chance.randint(2, 5)))


def _deep_text(chance: random.Random) -> bytes:
    """A join whose text is not text, or claims to be longer than its frame."""
    text = chance.choice((b"\xff\xfe", b"\xed\xa0\x80", b"a" * 60_000, b""))
    body = b"\x01" + chance.choice((len(text), 2**32 - 1, len(text) + 1)).to_bytes(4, "little") + text
    return len(body).to_bytes(4, "big") + body


def client_hello(chance: random.Random) -> bytes:
    """The first record of TLS 1.2, as far as it matters."""
    body = b"\x03\x03" + chance.randbytes(32) + b"\x00" + b"\x00\x02\x13\x01" + b"\x01\x00"
    handshake = b"\x01" + len(body).to_bytes(3, "big") + body
    return b"\x16\x03\x01" + len(handshake).to_bytes(2, "big") + handshake
