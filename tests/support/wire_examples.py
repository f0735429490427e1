"""Messages of the gradient server: each with its bytes, written by hand, and any other that can be made."""

from __future__ import annotations

from typing import Any, get_type_hints

import numpy
from hypothesis import strategies as st

from runtime.gradient_server.wire.fields import FloatArray, Number, RawField
from runtime.gradient_server.wire.messages import (
    GRADIENT_DTYPES,
    LAYOUTS,
    Again,
    Assignment,
    AveragedBlockGradient,
    AveragedGradient,
    AveragedNonBlockGradient,
    AverageDone,
    Beat,
    BlockGradientPayload,
    Challenge,
    Chunk,
    Codec,
    Component,
    Dtype,
    GradientDone,
    GradientPayload,
    Heartbeat,
    Hello,
    JoinAccepted,
    JoinRequest,
    Kind,
    Leave,
    Message,
    NonBlockGradientPayload,
    Part,
    Proof,
    Refused,
    ShardAssignment,
    Shutdown,
    StateDone,
    StateWanted,
    Table,
    Welcome,
)


def floats(*values: float) -> FloatArray:
    return numpy.array(values, numpy.float32)


# length, tag, then the fields in the order of the protocol's table.
V1: list[tuple[Message, str]] = [
    (JoinRequest("n1", 2, "cuda"), "00000013 01 02000000 6e31 02000000 04000000 63756461"),
    (JoinAccepted(1, 4), "00000009 02 01000000 04000000"),
    (ShardAssignment(7, 16, 32), "00000019 03 0700000000000000 1000000000000000 2000000000000000"),
    (
        GradientPayload(7, 1, floats(1.0, -2.5), 0.5, 3, 16),
        "00000031 04 0700000000000000 01000000 0200000000000000 0000803f 000020c0"
        " 0000003f 0300000000000000 1000000000000000",
    ),
    (
        GradientPayload(7, 1, floats(), 0.5, 3, 16),
        "00000029 04 0700000000000000 01000000 0000000000000000 0000003f 0300000000000000 1000000000000000",
    ),
    (
        AveragedGradient(7, floats(1.0), 0.25),
        "00000019 05 0700000000000000 0100000000000000 0000803f 0000803e",
    ),
    (Heartbeat("n1", 1_700_000_000_000), "0000000f 06 02000000 6e31 0068e5cf8b010000"),
    (Shutdown(), "00000001 07"),
    (
        BlockGradientPayload(7, 1, 11, 12, (2, 1), floats(1.0, 0.0, -1.0)),
        "00000035 08 0700000000000000 01000000 0b000000 0c000000 02000000 02000000 01000000"
        " 0300000000000000 0000803f 00000000 000080bf",
    ),
    (
        AveragedBlockGradient(7, 11, (3,), floats(1.0, 0.0, -1.0)),
        "00000029 09 0700000000000000 0b000000 01000000 03000000 0300000000000000 0000803f 00000000 000080bf",
    ),
    (
        NonBlockGradientPayload(7, 1, Component.EMBEDDING, floats(1.0)),
        "0000001a 0a 0700000000000000 01000000 02 0100000000000000 0000803f",
    ),
    (
        NonBlockGradientPayload(7, 1, Component.LM_HEAD, floats()),
        "00000016 0a 0700000000000000 01000000 00 0000000000000000",
    ),
    (
        AveragedNonBlockGradient(7, Component.FINAL_NORM, floats(1.0)),
        "00000016 0b 0700000000000000 01 0100000000000000 0000803f",
    ),
]
NONCE, NONCE32 = bytes(range(16)), bytes(range(32))
V2: list[tuple[Message, str]] = [
    (Hello(2, "n1", NONCE, 7, True), f"00000022 20 0200 02000000 6e31 {NONCE.hex()} 0700000000000000 01"),
    (Challenge(NONCE32), f"00000021 21 {NONCE32.hex()}"),
    (Proof(NONCE32), f"00000021 22 {NONCE32.hex()}"),
    (
        Welcome(1, 4, NONCE32, 5000, 30_000, 1 << 20, Codec.ZLIB),
        f"00000036 23 01000000 04000000 {NONCE32.hex()} 88130000 30750000 00001000 01",
    ),
    (Refused("old_step", "ü"), "00000013 24 08000000 6f6c645f73746570 02000000 c3bc"),
    (
        Assignment(7, 1, 16, 32, 64),
        "00000025 25 0700000000000000 01000000 1000000000000000 2000000000000000 4000000000000000",
    ),
    (StateWanted(7, 3), "0000000d 26 0700000000000000 03000000"),
    (
        Table(Kind.STATE, 7, 3, (Part(Dtype.FLOAT32, 5), Part(Dtype.INT8, 2))),
        "00000024 27 02 0700000000000000 03000000 02000000 00 0500000000000000 09 0200000000000000",
    ),
    (
        # xxh3_64 of the eight bytes
        Chunk(Kind.GRADIENT, 7, 1, 2, 64, Codec.NONE, 2, 0x3F8E59F0DAE191DE, bytes.fromhex("0000803f000020c0")),
        "0000002f 28 00 0700000000000000 01000000 02000000 4000000000000000 00 02000000 de91e1daf0598e3f"
        " 0000803f 000020c0",
    ),
    (
        GradientDone(7, 1, 0.5, 3, 16),
        "00000025 29 0700000000000000 01000000 000000000000e03f 0300000000000000 1000000000000000",
    ),
    (
        AverageDone(7, 1, 0.5, 3, 16, 2.0),
        "0000002d 2a 0700000000000000 01000000 000000000000e03f 0300000000000000 1000000000000000 0000000000000040",
    ),
    (Again(7, 2, "lost"), "00000015 2b 0700000000000000 02000000 04000000 6c6f7374"),
    (Beat(1_700_000_000_000), "00000009 2c 0068e5cf8b010000"),
    (Leave("done"), "00000009 2d 04000000 646f6e65"),
    (StateDone(7, 3), "0000000d 2e 0700000000000000 03000000"),
]
GOLDEN = [*V1, *V2]


def named(case: object) -> str | None:
    """For pytest's ids."""
    return type(case).__name__ if type(case) in {layout.kind for layout in LAYOUTS.values()} else None


def _tables() -> st.SearchStrategy[Any]:
    def parts(kind: Kind) -> st.SearchStrategy[Any]:
        dtypes = st.sampled_from(sorted(Dtype if kind is Kind.STATE else GRADIENT_DTYPES))
        rows = st.lists(st.builds(Part, dtypes, st.integers(0, 2**64 - 1)), max_size=5).map(tuple)
        return st.builds(Table, st.just(kind), _whole("Q"), _whole("I"), rows)

    return st.sampled_from(Kind).flatmap(parts)


def _whole(code: str) -> st.SearchStrategy[int]:
    return st.integers(0, {"H": 2**16, "I": 2**32, "Q": 2**64}[code] - 1)


def _field(hint: Any) -> st.SearchStrategy[Any]:
    kind, field = hint.__origin__, hint.__metadata__[0]
    if isinstance(field, RawField):
        return st.binary(min_size=field.num_bytes, max_size=field.num_bytes)
    if isinstance(field, Number) and field.code in "fd":
        return st.floats(width=32 if field.code == "f" else 64, allow_nan=False)
    if isinstance(field, Number):
        return _whole(field.code) if kind is int else st.sampled_from((False, True) if kind is bool else list(kind))
    by_name = {
        "TextField": st.text(st.characters(codec="utf-8"), max_size=20),
        "SizesField": st.lists(_whole("I"), max_size=5).map(tuple),
        "VectorField": st.lists(st.floats(width=32), max_size=9).map(lambda values: floats(*values)),
        "RestField": st.binary(max_size=40),
    }
    return by_name[type(field).__name__]


def any_message(kind: type[Any]) -> st.SearchStrategy[Any]:
    """Any message of this class."""
    if kind is Table:
        return _tables()
    hints = get_type_hints(kind, include_extras=True)
    return st.builds(kind, **{name: _field(hint) for name, hint in hints.items()})
