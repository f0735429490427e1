"""Settings of a gradient server."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from typing import Literal

from monitoring.http.addresses import is_loopback
from runtime.errors import ConfigError
from runtime.gradient_server.wire.messages import DEFAULT_PORT, MAX_CHUNK

Protocol = Literal["v1", "v2"]
Policy = Literal["halt", "go on"]
SharesBy = Literal["even", "by speed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientServerSettings:
    """Checked on creation: ConfigError names the option, its value and the limit."""

    workers: int
    """Workers to wait for before the first step."""
    samples: int
    """Samples of each step, over all workers."""
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    """0: any free port."""
    steps: int | None = None
    """The server ends before the step with this number; steps count from 0, also after a restart. None: it runs until
    it is stopped, or all workers have left."""
    protocol: Protocol = "v2"
    """Version 1 has no authentication and no encryption, so it is accepted only from this host and only without a
    token, unless this is `v1`."""
    token: bytes | None = None
    """For version 2; required if other hosts can reach the server."""
    tls: ssl.SSLContext | None = None
    join_seconds: float = 60.0
    """Time for the expected workers to join, and for each connection to complete its join."""
    heartbeat_seconds: float = 5.0
    """Each end sends a heartbeat after this long without sending anything else."""
    timeout_seconds: float = 30.0
    """A worker that is silent for this long counts as lost."""
    rejoin_seconds: float = 10.0
    """How long to wait for a lost worker of version 2 before others get its samples."""
    step_seconds: float | None = 1800.0
    """Time for a worker's gradient after its assignment, or for a state transfer; a worker that is late is refused,
    since one may send heartbeats and compute nothing. The default is that of torch's collectives. None: no limit."""
    policy: Policy = "halt"
    """When a gradient is refused: end the run, or go on without that worker."""
    shares: SharesBy = "even"
    min_workers: int = 1
    """No step begins with fewer; the server waits for more, up to `join_seconds`."""
    compression: bool = False
    """zlib. Worth it on networks below about 50 MB/s; gradients do not shrink much."""
    chunk_bytes: int = MAX_CHUNK
    """Largest chunk of version 2, in both directions."""
    memory_bytes: int | None = None
    """Limit for sums and averages, which take three times a float32 gradient. None: 3/4 of this machine's memory."""
    assigns_v1: bool = True
    """Whether workers of version 1 are sent their shares. Some that send blocks choose their samples by a rule of their
    own and expect no assignment."""

    def __post_init__(self) -> None:
        for problem in self._problems():
            raise ConfigError(problem)

    def _problems(self) -> list[str]:
        found = [
            f"{name} = {value}: at least {least}."
            for name, value, least in (
                ("workers", self.workers, 1),
                ("samples", self.samples, self.workers),
                ("min_workers", self.min_workers, 1),
                ("steps", 1 if self.steps is None else self.steps, 1),
                ("chunk_bytes", self.chunk_bytes, 1024),
            )
            if value < least
        ]
        found += [
            f"{name} = {value:g}: more than 0 seconds."
            for name, value in (
                ("join_seconds", self.join_seconds),
                ("heartbeat_seconds", self.heartbeat_seconds),
                ("timeout_seconds", self.timeout_seconds),
                ("rejoin_seconds", self.rejoin_seconds),
                ("step_seconds", 1.0 if self.step_seconds is None else self.step_seconds),
            )
            if not value > 0
        ]
        if self.min_workers > self.workers:
            found.append(f"min_workers = {self.min_workers}: at most workers = {self.workers}.")
        if self.chunk_bytes > MAX_CHUNK:
            found.append(f"chunk_bytes = {self.chunk_bytes}: at most {MAX_CHUNK}.")
        if self.timeout_seconds <= self.heartbeat_seconds:
            found.append(
                f"timeout_seconds = {self.timeout_seconds:g}: more than heartbeat_seconds = {self.heartbeat_seconds:g}."
            )
        if not self.token and self.protocol == "v2" and not is_loopback(self.host):
            found.append(f"{self.host}: other hosts can reach it, so it needs a token. Give --token-file.")
        return found
