"""What a run and its ranks are, apart from what happens in their steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple


class Status(StrEnum):
    """How a run is, or ended."""

    RUNNING = "running"
    COMPLETED = "completed"
    """All steps were made."""
    STOPPED = "stopped"
    """By its owner, after a whole step."""
    INTERRUPTED = "interrupted"
    FAILED = "failed"
    HUNG = "hung"
    """No rank failed, but one did not come in time."""

    @property
    def is_broken(self) -> bool:
        return self in (Status.FAILED, Status.HUNG)


class Place(NamedTuple):
    """A rank's coordinates in the mesh."""

    dp: int
    tp: int
    pp: int


@dataclass(frozen=True, slots=True)
class RankFacts:
    """Reported by the rank once it has joined its mesh."""

    rank: int
    place: Place
    host: str = ""
    device: str = "cpu"
    """As CUDA names it; `cpu` where there is none."""
    parameters: int = 0
    """Numbers that it trains."""
    num_cores: int = 0
    """Of its host, as far as the rank may use them and its control groups let it. 0: not known."""

    @property
    def is_cpu(self) -> bool:
        """Whether the processor time of its thread says how much it computed."""
        return self.device == "cpu"


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Known before the first rank starts."""

    run_id: str = ""
    world_size: int = 1
    dp: int = 1
    tp: int = 1
    pp: int = 1
    model: str = ""
    parameters: int = 0
    flops_per_token: float = 0.0
    precision: str = "float32"
    schedule: str = "1f1b"
    microbatches: int = 1
    virtual_stages: int = 1
    batch_size: int = 1
    steps: int = 0
    """That are wanted."""
    bucket_bytes: int = 25 << 20
    comm_strategy: str = "default"
    """How all-reduces are carried out."""
    shards_optimizer: bool = False
    """Whether replicas share the optimizer's state already."""
    memory_budget: int = 0
    """Bytes of one rank; 0: none is given."""
    prefetch: int = 2
    version: str = ""
    started: float = 0.0
    """Seconds of time.time."""
    layers_per_stage: tuple[int, ...] = field(default=())
