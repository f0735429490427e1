"""A worker of the gradient server: gets shares, sends gradients, receives averages, and reconnects when needed."""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import socket
import ssl
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Protocol, Self

from runtime.errors import InvalidCall, Mismatch, PeerLost
from runtime.gradient_server.client.protocol import Average, ServerRefused, Share, ShareChanged, WorkerProtocol
from runtime.gradient_server.client.raw_parts import RawPart
from runtime.gradient_server.client.session import Outgoing, Session
from runtime.gradient_server.wire.auth import WorkerHandshake
from runtime.gradient_server.wire.frames import Item, VectorBegins, VectorEnds, VectorPiece
from runtime.gradient_server.wire.link import LinkLost, connect, split_address
from runtime.gradient_server.wire.messages import AverageDone, Reason, StateDone, WireError
from runtime.logs import logger

GIVE_UP_SECONDS = 60.0
"""How long to try without a server, which may be restarted meanwhile."""
_CONNECT_SECONDS = 10.0
_FIRST_BACKOFF_SECONDS, _MOST_BACKOFF_SECONDS = 0.1, 5.0
_TRANSIENT = frozenset((Reason.ALREADY_JOINED, Reason.TOO_SLOW, Reason.OVER_BUDGET))
"""Reasons for which a join may be refused now and accepted a moment later."""


class Backoff:
    """The pauses between failed tries: twice as long each time, with jitter."""

    def __init__(self, first: float = _FIRST_BACKOFF_SECONDS, most: float = _MOST_BACKOFF_SECONDS) -> None:
        self._first, self._most, self._num_failed = first, most, 0

    def reset(self) -> None:
        """A try succeeded."""
        self._num_failed = 0

    def next(self) -> float:
        """Seconds to wait: a random half to whole of the doubled pause, so that a thousand workers do not all reconnect
        to a restarted server at once."""
        longest: float = min(self._most, self._first * 2 ** min(self._num_failed, 32))
        self._num_failed += 1
        return longest * random.uniform(0.5, 1.0)


class StateKeeper(Protocol):
    """Saves and loads the state that all workers must share. Called only between steps."""

    def save(self) -> Sequence[RawPart]:
        """The whole state. Its memory must not change until the next step."""

    def load(self, step: int, parts: Sequence[RawPart]) -> None:
        """Load another worker's state, to continue with this step. The keeper owns the memory from now on."""


class GradientClient:
    """One worker; use it with `async with`. It handles raw memory; `parallel3d.GradientWorker` handles torch.

    step, has_state: where it continues, if not at the start. keeper: None if workers share no state. Heartbeats need
    the event loop: compute in a thread.
    """

    def __init__(
        self,
        address: str,
        *,
        token: bytes | str | None = None,
        node_id: str | None = None,
        tls: ssl.SSLContext | None = None,
        keeper: StateKeeper | None = None,
        step: int = 0,
        has_state: bool = False,
        give_up_seconds: float = GIVE_UP_SECONDS,
    ) -> None:
        self.address = address
        split_address(address)  # raises InvalidCall if it is wrong
        self._token = token.encode() if isinstance(token, str) else token or b""
        self.node_id = node_id or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self.keeper, self._tls, self._give_up_seconds = keeper, tls, give_up_seconds
        self.worker_id: int | None = None
        """The server's id for this worker; None before the join."""
        self.num_joins = 0
        self._protocol = WorkerProtocol(step, has_state)
        self._session: Session | None = None
        self._outgoing: Outgoing | None = None
        self._sending: asyncio.Task[None] | None = None
        self._sent_as: tuple[Session, int] | None = None
        """The connection and the attempt for which the gradient is being sent."""
        self._backoff, self._failing_since = Backoff(), 0.0
        """Both count from the latest useful connection."""
        self._failure: Exception | None = None
        self._log = logger(worker=self.node_id, server=address)
        self._changed = asyncio.Event()
        self._running: asyncio.Task[None] | None = None
        self._has_share = self._is_closed = False
        self._was_useful = False
        """Whether this connection has delivered an average or a state."""

    @property
    def step(self) -> int:
        """The step that is computed or waited for next."""
        return self._protocol.step

    @property
    def ended_because(self) -> str | None:
        """The server's reason for its normal end; None before that."""
        return self._protocol.left

    async def __aenter__(self) -> Self:
        """Join. Raises PeerLost if there is no server, and ServerRefused."""
        if self._running is not None:
            raise InvalidCall("a worker is entered once; make a new one.")
        self._running = asyncio.create_task(self._run(), name="gradient worker")
        try:
            while self._session is None and self._protocol.left is None:
                await self._wait_for_change()
        except BaseException:
            await self._stop("it did not begin")
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            await self._stop("it has done its part")
        else:
            was_interrupted = isinstance(error, asyncio.CancelledError | KeyboardInterrupt)
            await self._stop("it was interrupted" if was_interrupted else f"it ends with {type(error).__name__}")

    async def _stop(self, reason: str) -> None:
        self._is_closed = True
        self._stop_sending()
        if self._session is not None:
            self._session.leave(reason)
            await self._session.closed()
        if self._running is not None:
            self._running.cancel()
            with suppress(asyncio.CancelledError):
                await self._running

    # For the caller.

    async def shares(self) -> AsyncGenerator[Share, None]:
        """This worker's share of each step, until the server ends. Asking for the next one means that the previous step
        is applied: between shares, states are sent to other workers and loaded from them."""
        while (share := await self.next_share()) is not None:
            yield share

    async def next_share(self) -> Share | None:
        """The next share; None if the server has ended normally."""
        self._refuse_if_closed("next_share")
        if self._has_share and self._protocol.share is not None:
            raise InvalidCall(f"the share of step {self._protocol.share.step} has no average yet: await that first.")
        self._has_share, self._outgoing = False, None
        self._stop_sending()
        while True:
            if self._failure is None and self._protocol.state is not None:
                self._load()
            elif self._failure is None and self._protocol.wanted_state is not None:
                await self._send_state()
            elif self._failure is None and (share := self._protocol.take_share()) is not None:
                await self._wait_until_sent()
                self._has_share = True
                return share
            elif self._protocol.left is not None:
                return None
            else:
                await self._wait_for_change()

    def begin(self, parts: Sequence[RawPart], homes: Sequence[RawPart]) -> Outgoing | None:
        """Start to send the share's gradient; call `advance` of the result as parts become ready. None if the share is
        obsolete. homes: memory for the average, with the same parts."""
        self._refuse_if_closed("begin")
        if not self._has_share:
            raise InvalidCall("a gradient belongs to a share: ask for the next one first.")
        if self._outgoing is not None:
            raise InvalidCall("this share's gradient is being sent already.")
        if self._protocol.share is None:
            return None
        self._protocol.expect(homes)
        self._outgoing = Outgoing(parts)
        self._send_if_requested()
        return self._outgoing

    async def average(
        self,
        parts: Sequence[RawPart],
        homes: Sequence[RawPart],
        *,
        loss: float = 0.0,
        correct: int = 0,
        total: int | None = None,
    ) -> Average:
        """Send the share's gradient, the mean over its samples, or the rest of it after `begin`; returns when the whole
        average is in `homes`. The gradient may be sent several times: its memory must not change meanwhile.

        total: number of samples, if not the share's. Raises ShareChanged if the average will not come, and PeerLost if
        the server is gone for good.
        """
        if self._outgoing is None:
            self.begin(parts, homes)
        share = self._protocol.share
        if share is not None and self._outgoing is not None:
            self._outgoing.complete(loss, correct, len(share) if total is None else total)
        while self._protocol.average is None:
            if self._failure is None and self._protocol.share is None:
                raise ShareChanged("this share's average will not come: ask for the next share.")
            if self._failure is None and self._protocol.wanted_state is not None:
                # After a restart, a worker that is behind may need it before the step can go on.
                await self._send_state()
            else:
                await self._wait_for_change()
        self._outgoing, self._has_share = None, False
        self._stop_sending()
        return self._protocol.take_average()

    def _refuse_if_closed(self, call: str) -> None:
        if self._is_closed or self._running is None:
            raise InvalidCall(f"{call}: use the worker inside of `async with`.")

    # Between steps.

    def _load(self) -> None:
        state = self._protocol.take_state()
        if self.keeper is None:
            if state.homes:
                raise Mismatch("other workers have a state that this one has no place for: attach the model first.")
            return
        self.keeper.load(state.table.step, state.homes)

    async def _send_state(self) -> None:
        wanted, session = self._protocol.wanted_state, self._session
        self._protocol.wanted_state = None
        if wanted is None or session is None:
            return
        if wanted.step != self._protocol.step:
            raise Mismatch(f"the server wants the state of step {wanted.step}, but this worker is at {self.step}.")
        with suppress(LinkLost):  # the server asks again
            await session.send_state(self.keeper.save() if self.keeper is not None else (), wanted)

    async def _wait_until_sent(self) -> None:
        """The next gradient overwrites the memory of the previous one, which may not be sent yet."""
        if self._session is not None:
            with suppress(LinkLost):
                await self._session.flushed()

    # Connections.

    async def _run(self) -> None:
        self._failing_since = time.monotonic()
        try:
            while self._protocol.left is None:
                self._session = session = await self._connect()
                self.num_joins += 1
                self._was_useful, joined = False, time.monotonic()
                self._send_if_requested()  # the assignment may have arrived together with the welcome
                self._changed.set()
                why = await session.keep_alive()
                self._session = None
                self._protocol.lost()
                self._send_if_requested()
                if self._failure is not None or self._is_closed:
                    return
                if self._protocol.left is None:
                    self._log.warning("the gradient server was lost", error=str(why))
                    await self._pause(
                        why, was_useful=self._was_useful or time.monotonic() - joined > _MOST_BACKOFF_SECONDS
                    )
        except Exception as error:
            self._fail(error)

    async def _connect(self) -> Session:
        """Try until a join succeeds."""
        while True:
            try:
                async with asyncio.timeout(_CONNECT_SECONDS):
                    return await self._join()
            except ServerRefused as error:
                if error.reason not in _TRANSIENT:
                    raise
                why: Exception = error
            except (LinkLost, WireError, TimeoutError) as error:
                if is_permanent(error):
                    raise PeerLost(f"the gradient server at {self.address} is not the right one: {error}") from error
                why = error
            await self._pause(why)

    async def _pause(self, why: Exception | None, *, was_useful: bool = False) -> None:
        """Wait before the next try. A connection that was lost without being useful counts as a failed try."""
        if was_useful:
            self._backoff.reset()
            self._failing_since = time.monotonic()
            return
        if time.monotonic() > self._failing_since + self._give_up_seconds:
            raise PeerLost(
                f"the gradient server at {self.address} was not there for {self._give_up_seconds:g} s: {why}"
            ) from None
        await asyncio.sleep(self._backoff.next())

    async def _join(self) -> Session:
        link = await connect(self.address, timeout=_CONNECT_SECONDS, tls=self._tls)
        protocol = self._protocol
        handshake = WorkerHandshake(self._token, self.node_id, step=protocol.next_step, has_state=protocol.has_state)
        session = Session(link, handshake, self._receive)
        try:
            self.worker_id = (await session.join()).worker_id
        except BaseException as error:
            session.abort(error if isinstance(error, Exception) else LinkLost("the join was broken off"))
            raise
        return session

    def _receive(self, item: Item) -> memoryview | None:
        if isinstance(item, VectorBegins | VectorPiece | VectorEnds):
            return self._protocol.receive_chunk(item)  # no wake-up: an average counts once it is complete
        try:
            self._protocol.receive(item)
        except (ServerRefused, Mismatch) as error:
            self._fail(error)
        if isinstance(item, AverageDone | StateDone):
            self._was_useful = True
        self._send_if_requested()
        self._changed.set()
        return None

    def _fail(self, error: Exception) -> None:
        """Make every call raise this error from now on."""
        self._failure = self._failure or error
        self._protocol.lost()
        self._changed.set()

    async def _wait_for_change(self) -> None:
        """Wait until anything has changed."""
        if self._failure is not None:
            raise self._failure
        self._changed.clear()
        await self._changed.wait()
        if self._failure is not None:
            raise self._failure

    # Sending gradients.

    def _send_if_requested(self) -> None:
        """Start to send the gradient, or start over, if the server asked for it in a new attempt or connection."""
        share, wanted = self._protocol.share, None
        if (
            share is not None
            and self._protocol.is_requested
            and self._session is not None
            and self._outgoing is not None
        ):
            wanted = self._session, share.attempt
        if wanted == self._sent_as:
            return
        self._stop_sending()
        if wanted is not None and share is not None and self._outgoing is not None:
            self._sent_as = wanted
            self._sending = asyncio.create_task(self._send(wanted[0], self._outgoing, share))

    async def _send(self, session: Session, outgoing: Outgoing, share: Share) -> None:
        try:
            await session.send_gradient(outgoing, share)
        except LinkLost:
            pass  # it is sent again on the next connection
        except Exception as error:
            self._fail(error)

    def _stop_sending(self) -> None:
        self._sent_as = None
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None


def is_permanent(error: Exception) -> bool:
    """Whether another try would fail in the same way."""
    is_impostor = isinstance(error, WireError) and error.reason is Reason.BAD_TOKEN
    return is_impostor or isinstance(error.__cause__, ssl.SSLCertVerificationError)
