"""What a gradient server is told before it starts."""

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
    """Checked when it is made: ConfigError names the option and says what would do."""

    workers: int
    """That are waited for before the first step."""
    samples: int
    """Of each step, all workers together."""
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    """0: any that is free."""
    steps: int | None = None
    """The server ends before the step with this number; steps count from 0, also after a restart. None: when it is
    stopped, or all workers have left."""
    protocol: Protocol = "v2"
    """Version 1 proves nothing and encrypts nothing, so it is taken from this host only, and where there is no token,
    unless `v1` allows it."""
    token: bytes | None = None
    """Version 2's; needed wherever others than this host can reach the server."""
    tls: ssl.SSLContext | None = None
    join_seconds: float = 60.0
    """For the expected workers to join, and for a connection to say who it is."""
    heartbeat_seconds: float = 5.0
    """After so long without anything else to say, each end says that it is there."""
    timeout_seconds: float = 30.0
    """A worker that is not heard for so long is lost."""
    rejoin_seconds: float = 10.0
    """How long a lost worker of version 2 is waited for before others get its samples."""
    step_seconds: float | None = 1800.0
    """For a worker's gradient to come after the assignment, or for a state to be handed on; else whoever is late is
    refused: a worker may beat and compute nothing. As long as torch's own collectives wait. None: what it takes."""
    policy: Policy = "halt"
    """For gradients that are refused: the run ends, or goes on without that worker."""
    shares: SharesBy = "even"
    min_workers: int = 1
    """With fewer no step is begun; more are waited for, up to `join_seconds`."""
    compression: bool = False
    """zlib. For networks slower than some 50 MB/s; gradients do not shrink much."""
    chunk_bytes: int = MAX_CHUNK
    """Of version 2's chunks, both ways."""
    memory_bytes: int | None = None
    """For sums and averages: three times the gradient, as float32. None: three quarters of this machine's memory."""
    assigns_v1: bool = True
    """Whether workers of version 1 are told their samples. Some that send blocks take their samples by their own
    rule, and do not expect to be told."""

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
            found.append(f"{self.host}: others than this host can reach it, so it takes a token. Give --token-file.")
        return found
