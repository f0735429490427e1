"""Messages from ranks to their run: a dataclass for each kind, and the decoder that validates them on arrival."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from monitoring.checks import count, finite, number, or_null, text, whole_number
from monitoring.events.collectives import CollectiveRecorder, CollectiveTotal, Key
from monitoring.events.events import RECORD_BYTES, Event, unpack
from monitoring.events.loop_lag import LagHistogram
from monitoring.events.time_parts import TimeParts

Wire = Mapping[str, Any]
"""A message on the control channel: its `kind`, and fields of JSON types."""
_TARGET = re.compile(r"(?:[A-Za-z0-9._-]{1,253}|\[[0-9a-f:]{2,39}\]):[0-9]{1,5}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Joined:
    """`mesh`: the rank has its coordinates."""

    dp: int
    tp: int
    pp: int


@dataclass(frozen=True, slots=True)
class Ready:
    """`ready`: the rank has its model and is about to train."""

    host: str
    device: str
    """CUDA's name of the device, or `cpu`."""
    parameters: int
    """Number of trainable parameters on this rank."""
    num_cores: int
    """Cores of the host that the rank may use; 0 if unknown."""


@dataclass(frozen=True, slots=True)
class RunStep:
    """`step`, sent by rank 0: one step of the whole mesh."""

    step: int
    """Counted from 0."""
    loss: float
    """The mean over the whole batch."""
    grad_norm: float
    """Norm of all gradients of the mesh, before clipping."""
    learning_rate: float
    tokens: int
    """Number of targets in the whole batch."""
    seconds: float
    """Measured from the end of the previous step, so it includes waiting for data."""
    all_reduce_bandwidth: float | None = field(default=None, kw_only=True)
    """Bus bandwidth in 10⁹ bytes a second: of the gradients' reduction or, with a single replica, of tensor-parallel
    all-reduces. None if nothing was reduced."""

    @property
    def tokens_per_second(self) -> float:
        """Of the whole mesh."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    def to_json(self) -> dict[str, Any]:
        """The form in `events.jsonl`; numbers that are not finite become null."""
        return {
            "step": self.step,
            "loss": or_null(self.loss),
            "grad_norm": or_null(self.grad_norm),
            "learning_rate": or_null(self.learning_rate),
            "tokens": self.tokens,
            "seconds": self.seconds,
        }

    def to_json_with(self, parts: TimeParts | None) -> dict[str, Any]:
        """The form that the page reads. parts: the ranks' mean for this step; None if not known (yet)."""
        return {**self.to_json(), "parts": None if parts is None else parts.to_json()}


@dataclass(frozen=True, slots=True)
class Events:
    """`events`: records of a rank's recorder. They stay packed until the monitor thread analyses them."""

    data: str
    """Packed records, in base64."""
    dropped: int
    """Number of events lost since the rank started."""

    @staticmethod
    def to_wire(data: bytes, dropped: int) -> dict[str, object]:
        return {"data": base64.b64encode(data).decode(), "dropped": dropped}

    def unpack(self, offset: float) -> list[Event]:
        """The events, with `offset` added to their times. Raises ValueError for data that no recorder wrote."""
        return unpack(base64.b64decode(self.data, validate=True), offset)

    @property
    def num_events(self) -> int:
        """Computed from the size, without unpacking."""
        return len(self.data) * 3 // 4 // RECORD_BYTES


@dataclass(frozen=True, slots=True)
class Memory:
    """`memory`: bytes that the rank's process uses, in total and by kind."""

    process: int
    kinds: Mapping[str, int]
    """Bytes by kind; each is included in `process`."""


@dataclass(frozen=True, slots=True)
class DataQueue:
    """`queue`: batches that were ready when the rank asked for one, averaged since its previous report."""

    mean: float
    capacity: int


@dataclass(frozen=True, slots=True)
class LoopLag:
    """`loop_lag`: how late the rank's event loop ran its timers, since the rank started."""

    histogram: LagHistogram


@dataclass(frozen=True, slots=True)
class Collectives:
    """`collectives`: totals of the rank's calls on the groups of one mesh, since that mesh was made."""

    mesh: int
    totals: Mapping[Key, CollectiveTotal]


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """`clock`: seconds to add to the rank's times to convert them to rank 0's clock."""

    seconds: float


@dataclass(frozen=True, slots=True)
class LogLine:
    """`log`: a record of the rank's logger, with any fields; `rank` is the sender."""

    record: dict[str, Any]


@dataclass(frozen=True, slots=True)
class NonFinite:
    """`nonfinite`: a step's gradients were not finite."""

    step: int


@dataclass(frozen=True, slots=True)
class RankEndpoint:
    """`endpoint`: where the rank serves metrics of its own, such as 127.0.0.1:40123."""

    target: str
    scheme: str


@dataclass(frozen=True, slots=True)
class Malformed:
    """Stands for a message that could not be decoded."""


Message = (
    Joined | Ready | RunStep | Events | Memory | DataQueue | LoopLag | Collectives | ClockOffset | LogLine | NonFinite
    | RankEndpoint | Malformed
)  # fmt: skip


def decode(rank: int, message: Wire) -> Message | None:
    """The decoded message; None if its kind is not listed here, or for a step that is not from rank 0.

    Raises ValueError if it is malformed: messages from ranks are not trusted.
    """
    reads = _READERS.get(str(message.get("kind")))
    if reads is None:
        return None
    try:
        return reads(rank, message)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"rank {rank} sent a malformed message of kind {message['kind']}: {error!r}") from error


def receive(rank: int, message: Wire) -> Message | None:
    """Like `decode`, but returns `Malformed` instead of raising."""
    try:
        return decode(rank, message)
    except ValueError:
        return Malformed()


def _joined(_: int, message: Wire) -> Joined:
    dp, tp, pp = map(count, message["coords"])
    return Joined(dp, tp, pp)


def _ready(_: int, message: Wire) -> Ready:
    return Ready(
        host=text(message.get("host", "")),
        device=text(message["device"]),
        parameters=count(message["parameters"]),
        num_cores=count(message.get("num_cores", 0)),
    )


def _step(rank: int, message: Wire) -> RunStep | None:
    if rank != 0:
        return None
    bandwidth = message.get("bandwidth")
    return RunStep(
        step=count(message["step"]),
        loss=number(message["loss"]),
        grad_norm=number(message["grad_norm"]),
        learning_rate=number(message["learning_rate"]),
        tokens=count(message["tokens"]),
        seconds=finite(message["seconds"]),
        all_reduce_bandwidth=None if bandwidth is None else number(bandwidth),
    )


def _events(_: int, message: Wire) -> Events:
    data = message["data"]
    if not isinstance(data, str):
        raise ValueError(f"{type(data).__name__} is not base64")
    return Events(data, count(message["dropped"]))


def _memory(_: int, message: Wire) -> Memory:
    kinds = {text(kind): count(size) for kind, size in dict(message.get("kinds", {})).items()}
    return Memory(count(message["bytes"]), kinds)


def _endpoint(_: int, message: Wire) -> RankEndpoint:
    target, scheme = text(message["target"]), text(message["scheme"])
    if scheme not in ("http", "https") or not _TARGET.fullmatch(target):
        raise ValueError(f"{scheme}://{target} is not the address of an endpoint")
    return RankEndpoint(target, scheme)


def _log_line(rank: int, message: Wire) -> LogLine:
    return LogLine({key: value for key, value in message.items() if key != "kind"} | {"rank": rank})


_READERS: Mapping[str, Callable[[int, Wire], Message | None]] = {
    "mesh": _joined,
    "ready": _ready,
    "step": _step,
    "events": _events,
    "memory": _memory,
    "queue": lambda _, message: DataQueue(finite(message["mean"]), count(message["capacity"])),
    "loop_lag": lambda _, message: LoopLag(LagHistogram.from_wire(message)),
    "collectives": lambda _, message: Collectives(whole_number(message["mesh"]), CollectiveRecorder.from_wire(message)),
    "clock": lambda _, message: ClockOffset(finite(message["offset"])),
    "log": _log_line,
    "nonfinite": lambda _, message: NonFinite(count(message["step"])),
    "endpoint": _endpoint,
}
KINDS = tuple(_READERS)
