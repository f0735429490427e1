"""A gradient server: workers join over TCP, get shares of each step's samples, and their gradients are averaged."""

from __future__ import annotations

import asyncio
import socket
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Self

from monitoring.http.addresses import host_and_port
from monitoring.prometheus.gradient_server_metrics import GradientServerFigures, GradientServerTotals
from runtime.errors import LaunchError
from runtime.gradient_server.connection import Connection, LivenessMonitor
from runtime.gradient_server.events import Finish, Joined, Lost, Misbehaved, Started, StopAsked
from runtime.gradient_server.round_runner import OnStep, RoundRunner, StepRecord
from runtime.gradient_server.rounds import Phase
from runtime.gradient_server.settings import GradientServerSettings
from runtime.gradient_server.state_relay import StateRelay
from runtime.gradient_server.wire.auth import SeenNonces, ServerHandshake
from runtime.gradient_server.wire.link import Link, LinkLost, serve
from runtime.gradient_server.wire.messages import (
    Hello,
    JoinAccepted,
    JoinRequest,
    Reason,
    Refused,
    Shutdown,
    Welcome,
    WireError,
    encode_parts,
)
from runtime.logs import logger

__all__ = ["GradientServer", "GradientServerSettings", "ServerSummary", "StepRecord"]

_NETWORK_FAULTS = frozenset({Reason.BAD_CHECKSUM})  # not the worker's fault: it may rejoin and send again
_BACKLOG = 1024


@dataclass(frozen=True, slots=True)
class ServerSummary:
    """How a run ended that did not fail."""

    reason: str
    steps: int
    """Steps completed by this server process."""
    next_step: int
    last_loss: float | None
    seconds: float
    reduction_seconds: float
    """Sum over all steps: from the first byte of a step's gradients to its last average."""
    bytes_in: int
    bytes_out: int
    refused: dict[str, int]
    """By reason."""


class GradientServer:
    """Use it with `async with`. `on_step` is called with each completed step."""

    def __init__(self, settings: GradientServerSettings, on_step: OnStep = lambda record: None) -> None:
        self.settings = settings
        self.totals = GradientServerTotals()
        self.connections: set[Connection] = set()
        self._runner = RoundRunner(settings, self.totals, on_step, self._finish)
        self._liveness = LivenessMonitor(settings, self)
        self._log = logger("gradient_server")
        self._seen = SeenNonces()
        self._started = 0.0
        self._port = settings.port
        self._server: asyncio.Server | None = None
        self._finished: asyncio.Future[ServerSummary] | None = None
        self._ending: asyncio.Task[None] | None = None

    # For its owner.

    async def __aenter__(self) -> Self:
        """Start to listen. Raises LaunchError if the address cannot be used."""
        self._finished = asyncio.get_running_loop().create_future()
        listener = await _listen(self.settings.host, self.settings.port)
        self._port = listener.getsockname()[1]
        self._server = await serve(listener, self._on_link, tls=self.settings.tls)
        self._started = time.monotonic()
        self._runner.handle(Started())
        self._liveness.start()
        self._log.info("listening", address=self.address, workers=self.settings.workers)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        is_stopped = error is None or isinstance(error, asyncio.CancelledError)
        self.stop("it was stopped" if is_stopped else f"it ends with {type(error).__name__}")
        assert self._ending is not None
        try:
            await asyncio.shield(self._ending)
        except asyncio.CancelledError:  # no time left to send the rest
            self.hang_up()
            raise

    @property
    def address(self) -> str:
        """HOST:PORT, as workers need it."""
        return host_and_port(self.settings.host, self._port)

    async def finished(self) -> ServerSummary:
        """Wait for the end of the run, with all connections closed. Raises DeadlineExceeded if too few workers joined;
        PeerLost, NonFiniteGradient or Mismatch if a worker ended the run."""
        assert self._finished is not None
        return await asyncio.shield(self._finished)

    def stop(self, reason: str = "it was stopped") -> None:
        """End normally: finished averages are still sent, then each worker gets the reason."""
        self._runner.handle(StopAsked(reason))

    def hang_up(self) -> None:
        """Abort all connections: unsent bytes are dropped."""
        for connection in list(self.connections):
            connection.link.abort()

    def figures(self) -> GradientServerFigures:
        """For `GradientServerMetrics`; from any thread."""
        connections, totals = list(self.connections), self.totals
        versions = Counter("none" if each.worker is None else str(each.version) for each in connections)
        return GradientServerFigures(
            totals=totals,
            connections={name: versions[name] for name in ("none", "1", "2")},
            workers=len(self._runner.workers),
            bytes_in=totals.bytes_in + sum(each.link.bytes_in for each in connections),
            bytes_out=totals.bytes_out + sum(each.link.bytes_out for each in connections),
            bytes_waiting=sum(each.link.bytes_waiting for each in connections),
        )

    # Joins.

    def _on_link(self, link: Link) -> None:
        if self.is_ending:
            link.abort()
            return
        handshake = ServerHandshake(self.settings.token or b"", self._seen)
        connection = Connection(link, handshake, self._join, self.drop)
        self.connections.add(connection)
        link.on_lost = partial(self._lost, connection)

    def _join(self, connection: Connection, who: Hello | JoinRequest, mac: bytes) -> None:
        version, runner = 1 if isinstance(who, JoinRequest) else 2, self._runner
        self._check_join(connection, who.node_id, version)
        if version == 2 and (known := runner.rounds.roster.find(who.node_id)) is not None and known.is_here:
            self._replace(known.worker, connection)
        step, has_state = (who.step, who.has_state) if isinstance(who, Hello) else (0, False)
        worker = runner.rounds.roster.admit(who.node_id, version, step, has_state).worker
        runner.workers[worker] = connection
        connection.joined(worker, runner, assigns_v1=self.settings.assigns_v1)
        self._welcome(connection, worker, mac)
        self._log.info(
            "joined", worker=worker, node_id=who.node_id, version=version, at=step, peer=connection.link.peer
        )
        runner.handle(Joined(worker))

    def _check_join(self, connection: Connection, node_id: str, version: int) -> None:
        if version == 1 and self.settings.protocol != "v1" and not (connection.is_local and not self.settings.token):
            detail = "version 1 knows no token and is taken from this host only. --protocol v1 allows it."
            raise WireError(Reason.VERSION_REFUSED, detail)
        if version == 2 and not self.settings.token and not connection.is_local:
            raise WireError(Reason.BAD_TOKEN, "this server has no token, so it takes version 1 only.")
        if (refusal := self._runner.rounds.refusal(node_id, version)) is not None:
            raise refusal

    def _replace(self, worker: int, connection: Connection) -> None:
        """The worker is back before its old connection was found to be broken."""
        self.drop(self._runner.workers[worker], LinkLost(f"it has joined again from {connection.link.peer}"))

    def _welcome(self, connection: Connection, worker: int, mac: bytes) -> None:
        settings, total = self.settings, max(self.settings.workers, len(self._runner.workers))
        if connection.version == 1:
            connection.outbox.put(JoinAccepted(worker, total))
            return
        beat, timeout = (round(each * 1000) for each in (settings.heartbeat_seconds, settings.timeout_seconds))
        codec = self._runner.codec
        connection.outbox.put(Welcome(worker, total, mac, beat, timeout, settings.chunk_bytes, codec))

    # Losses.

    def drop(self, connection: Connection, error: BaseException) -> None:
        """Close the connection and count it as lost."""
        self._lost(connection, error)
        if isinstance(error, WireError):
            connection.link.close()
        else:
            connection.link.abort()

    def _lost(self, connection: Connection, error: BaseException | None) -> None:
        """A link is gone, or its peer was refused. Only the first reason counts."""
        if connection not in self.connections:
            return
        self.connections.discard(connection)
        self.totals.bytes_in += connection.link.bytes_in
        self.totals.bytes_out += connection.link.bytes_out
        if isinstance(error, WireError):
            self._note_refusal(connection, error)
        connection.forget()
        worker = connection.worker
        if not self._runner.forget(connection) or worker is None:
            return
        if not self.is_ending:
            self._log.warning("lost", worker=worker, why=str(error))
        if isinstance(error, WireError) and error.reason not in _NETWORK_FAULTS:
            self._runner.handle(Misbehaved(worker, error))
        else:
            self._runner.handle(Lost(worker, str(error) or repr(error)))

    def _note_refusal(self, connection: Connection, error: WireError) -> None:
        self.totals.rejected[str(error.reason)] += 1
        self._log.warning("refused", peer=connection.link.peer, worker=connection.worker, why=str(error))
        # Not through the outbox, for the link is closed next. Only version 2's frames are always written whole.
        if connection.version == 2 and error.reason not in _NETWORK_FAULTS:
            connection.link.write(*encode_parts(Refused(error.reason, error.detail)))
        elif connection.version == 1 and connection.outbox.is_empty:
            connection.link.write(*encode_parts(Shutdown()))

    # The end.

    @property
    def is_ending(self) -> bool:
        return self._runner.rounds.phase is Phase.DONE

    @property
    def relay(self) -> StateRelay | None:
        """For the liveness monitor."""
        return self._runner.relay

    @property
    def relay_source(self) -> Connection | None:
        return self._runner.relay_source

    def _finish(self, finish: Finish) -> None:
        self._log.info("ends", why=finish.reason, steps=self._runner.rounds.num_steps)
        if self._server is not None:
            self._server.close()
        for connection in list(self.connections):
            if connection.sender is not None and connection in self._runner.workers.values():
                if finish.error is None:
                    connection.sender.leave(finish.reason)
                else:
                    connection.sender.refuse(finish.code, finish.reason)
            connection.end()
        self._ending = asyncio.create_task(self._end(finish), name="end of the gradient server")

    async def _end(self, finish: Finish) -> None:
        for connection in list(self.connections):
            await connection.link.closed()  # the liveness monitor drops those that are stuck
        self._liveness.stop()
        self._runner.close()
        assert self._finished is not None
        if self._finished.done():
            return
        if finish.error is None:
            self._finished.set_result(self._summary(finish.reason))
        else:
            self._finished.set_exception(finish.error)
            self._finished.exception()  # marks it as retrieved, so that an owner that never asks gets no warning

    def _summary(self, reason: str) -> ServerSummary:
        totals, rounds = self.totals, self._runner.rounds
        return ServerSummary(
            reason=reason,
            steps=rounds.num_steps,
            next_step=rounds.step,
            last_loss=self._runner.last_loss,
            seconds=time.monotonic() - self._started,
            reduction_seconds=totals.reduction_seconds,
            bytes_in=totals.bytes_in,
            bytes_out=totals.bytes_out,
            refused=dict(totals.rejected),
        )


async def _listen(host: str, port: int) -> socket.socket:
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, _, _, _, address = found[0]
        return socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    except OSError as error:
        raise LaunchError(f"{host_and_port(host, port)} cannot be listened on: {error}.") from error
