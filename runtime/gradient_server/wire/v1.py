"""Messages of protocol version 1, byte for byte as existing workers send and expect them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, TypeAlias

from runtime.gradient_server.wire.fields import F32, U32, U64, Sizes, Text, Vector, VectorMessage, one_of
from runtime.gradient_server.wire.refusals import Reason

MAX_FRAME_V1 = 100_000_000
"""Bytes after the length."""


class Component(IntEnum):
    """Parameters of a model outside of its blocks."""

    LM_HEAD = 0
    FINAL_NORM = 1
    EMBEDDING = 2


ComponentField: TypeAlias = Annotated[Component, one_of(Component, Reason.WRONG_COMPONENT)]


@dataclass(frozen=True, slots=True)
class JoinRequest:
    node_id: Text
    gpu_count: U32
    backend: Text


@dataclass(frozen=True, slots=True)
class JoinAccepted:
    worker_id: U32
    total_workers: U32


@dataclass(frozen=True, slots=True)
class ShardAssignment:
    """Samples [start, end) of this step."""

    step: U64
    start: U64
    end: U64


@dataclass(frozen=True, slots=True, eq=False)
class GradientPayload(VectorMessage):
    step: U64
    worker_id: U32
    vector: Vector
    loss: F32
    correct: U64
    total: U64


@dataclass(frozen=True, slots=True, eq=False)
class AveragedGradient(VectorMessage):
    step: U64
    vector: Vector
    global_loss: F32


@dataclass(frozen=True, slots=True)
class Heartbeat:
    node_id: Text
    timestamp_ms: U64


@dataclass(frozen=True, slots=True)
class Shutdown:
    """From a worker: it leaves. From the server: the run is over."""


@dataclass(frozen=True, slots=True, eq=False)
class BlockGradientPayload(VectorMessage):
    step: U64
    worker_id: U32
    block: U32
    num_blocks: U32
    sizes: Sizes
    vector: Vector


@dataclass(frozen=True, slots=True, eq=False)
class AveragedBlockGradient(VectorMessage):
    step: U64
    block: U32
    sizes: Sizes
    vector: Vector


@dataclass(frozen=True, slots=True, eq=False)
class NonBlockGradientPayload(VectorMessage):
    step: U64
    worker_id: U32
    component: ComponentField
    vector: Vector


@dataclass(frozen=True, slots=True, eq=False)
class AveragedNonBlockGradient(VectorMessage):
    step: U64
    component: ComponentField
    vector: Vector


MessageV1: TypeAlias = (
    JoinRequest
    | JoinAccepted
    | ShardAssignment
    | GradientPayload
    | AveragedGradient
    | Heartbeat
    | Shutdown
    | BlockGradientPayload
    | AveragedBlockGradient
    | NonBlockGradientPayload
    | AveragedNonBlockGradient
)

TAGS_V1: dict[int, type[MessageV1]] = {
    0x01: JoinRequest,
    0x02: JoinAccepted,
    0x03: ShardAssignment,
    0x04: GradientPayload,
    0x05: AveragedGradient,
    0x06: Heartbeat,
    0x07: Shutdown,
    0x08: BlockGradientPayload,
    0x09: AveragedBlockGradient,
    0x0A: NonBlockGradientPayload,
    0x0B: AveragedNonBlockGradient,
}
