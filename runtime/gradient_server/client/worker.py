"""A worker of the gradient server: shares in, gradients out, averages back; over as many connections as it takes."""

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
"""Without a server. It may be started again meanwhile."""
_TRY_SECONDS = 10.0
FIRST_SECONDS, MOST_SECONDS = 0.1, 5.0
_PASSING = frozenset((Reason.ALREADY_JOINED, Reason.TOO_SLOW, Reason.OVER_BUDGET))
"""Why a join may be refused now, and taken a moment later."""


class Backoff:
    """The waits between tries that failed one after the other."""

    def __init__(self, first: float = FIRST_SECONDS, most: float = MOST_SECONDS) -> None:
        self._first, self._most, self._num_failed = first, most, 0

    def reset(self) -> None:
        """A try went well."""
        self._num_failed = 0

    def next(self) -> float:
        """Seconds: between a half and the whole of what doubling gives, so that a thousand workers whose server came
        back do not all knock at once."""
        longest: float = min(self._most, self._first * 2 ** min(self._num_failed, 32))
        self._num_failed += 1
        return longest * random.uniform(0.5, 1.0)


class StateKeeper(Protocol):
    """What workers have to have in common before they go on together. Called between two steps only."""

    def save(self) -> Sequence[RawPart]:
        """All of it. The memory stays as it is until the next step."""

    def load(self, step: int, parts: Sequence[RawPart]) -> None:
        """Another worker's, to go on with this step. The memory is the keeper's."""


class GradientClient:
    """One worker, for `async with`. It knows raw memory only; `parallel3d.GradientWorker` is for torch.

    step, has_state: where it goes on from, if it does not begin. keeper: without one, it has nothing in common with
    others. The event loop has to run now and then: who computes for long does so in a thread.
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
        split_address(address)  # which says what is wrong with it
        self._token = token.encode() if isinstance(token, str) else token or b""
        self.node_id = node_id or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self.keeper, self._tls, self._give_up_seconds = keeper, tls, give_up_seconds
        self.worker_id: int | None = None
        """The server's number for this worker, once it has joined."""
        self.num_joins = 0
        self._turn = WorkerProtocol(step, has_state)
        self._session: Session | None = None
        self._outgoing: Outgoing | None = None
        self._sending: asyncio.Task[None] | None = None
        self._sent_as: tuple[Session, int] | None = None
        """The connection and the attempt that the gradient is being sent for."""
        self._backoff, self._failing_since = Backoff(), 0.0
        """Over all connections since one that was of use."""
        self._failure: Exception | None = None
        self._log = logger(worker=self.node_id, server=address)
        self._changed = asyncio.Event()
        self._running: asyncio.Task[None] | None = None
        self._has_share = self._is_closed = False
        self._was_of_use = False
        """Whether this connection has brought an average or a state."""

    @property
    def step(self) -> int:
        """The one that is computed or waited for next."""
        return self._turn.step

    @property
    def ended_because(self) -> str | None:
        """What the server said when it ended in order; None as long as it has not."""
        return self._turn.left

    async def __aenter__(self) -> Self:
        """Joins. Raises PeerLost where no server is found, and ServerRefused."""
        if self._running is not None:
            raise InvalidCall("a worker is entered once; make a new one.")
        self._running = asyncio.create_task(self._run(), name="gradient worker")
        try:
            while self._session is None and self._turn.left is None:
                await self._change()
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
            was_told = isinstance(error, asyncio.CancelledError | KeyboardInterrupt)
            await self._stop("it was interrupted" if was_told else f"it ends with {type(error).__name__}")

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

    # What the caller asks for.

    async def shares(self) -> AsyncGenerator[Share, None]:
        """This worker's share of each step, until the server ends. To ask for one says that the step before has been
        applied: between two of them, states are given to other workers and taken from them."""
        while (share := await self.next_share()) is not None:
            yield share

    async def next_share(self) -> Share | None:
        """None where the server has ended in order."""
        self._refuse_if_closed("next_share")
        if self._has_share and self._turn.share is not None:
            raise InvalidCall(f"the share of step {self._turn.share.step} has no average yet: await that first.")
        self._has_share, self._outgoing = False, None
        self._stop_sending()
        while True:
            if self._failure is None and self._turn.state is not None:
                self._load()
            elif self._failure is None and self._turn.wanted_state is not None:
                await self._send_state()
            elif self._failure is None and (share := self._turn.take_share()) is not None:
                await self._wait_until_sent()
                self._has_share = True
                return share
            elif self._turn.left is not None:
                return None
            else:
                await self._change()

    def begin(self, parts: Sequence[RawPart], homes: Sequence[RawPart]) -> Outgoing | None:
        """Begin to send the share's gradient, part by part: `advance` of what this gives says which ones are there.
        None where the share is not wanted any more. homes: where the average is written to, as parts as these."""
        self._refuse_if_closed("begin")
        if not self._has_share:
            raise InvalidCall("a gradient belongs to a share: ask for the next one first.")
        if self._outgoing is not None:
            raise InvalidCall("this share's gradient is on its way already.")
        if self._turn.share is None:
            return None
        self._turn.expect(homes)
        self._outgoing = Outgoing(parts)
        self._send_as_told()
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
        """Send the share's gradient, the mean over its samples, or what is left of it after `begin`; returns when all
        of the average is in `homes`. The gradient is sent as often as it takes; its memory has to stay as it is.

        total: samples, if not those of the share. Raises ShareChanged where the average will not come, and PeerLost
        where the server is gone for good.
        """
        if self._outgoing is None:
            self.begin(parts, homes)
        share = self._turn.share
        if share is not None and self._outgoing is not None:
            self._outgoing.complete(loss, correct, len(share) if total is None else total)
        while self._turn.average is None:
            if self._failure is None and self._turn.share is None:
                raise ShareChanged("this share's average will not come: ask for the next share.")
            if self._failure is None and self._turn.wanted_state is not None:
                await self._send_state()  # after a restart, one that is behind may need it before anybody goes on
            else:
                await self._change()
        self._outgoing, self._has_share = None, False
        self._stop_sending()
        return self._turn.take_average()

    def _refuse_if_closed(self, call: str) -> None:
        if self._is_closed or self._running is None:
            raise InvalidCall(f"{call}: a worker works inside of `async with` only.")

    # Between two steps.

    def _load(self) -> None:
        state = self._turn.take_state()
        if self.keeper is None:
            if state.homes:
                raise Mismatch("other workers have a state that this one has no place for: attach the model first.")
            return
        self.keeper.load(state.table.step, state.homes)

    async def _send_state(self) -> None:
        wanted, session = self._turn.wanted_state, self._session
        self._turn.wanted_state = None
        if wanted is None or session is None:
            return
        if wanted.step != self._turn.step:
            raise Mismatch(f"the server wants the state of step {wanted.step}, but this worker is at {self.step}.")
        with suppress(LinkLost):  # whoever needs it asks again
            await session.send_state(self.keeper.save() if self.keeper is not None else (), wanted)

    async def _wait_until_sent(self) -> None:
        """What was sent of an earlier share lies in memory that the next one's gradient is written to."""
        if self._session is not None:
            with suppress(LinkLost):
                await self._session.flushed()

    # Connections.

    async def _run(self) -> None:
        self._failing_since = time.monotonic()
        try:
            while self._turn.left is None:
                self._session = session = await self._connect()
                self.num_joins += 1
                self._was_of_use, joined = False, time.monotonic()
                self._send_as_told()  # what came together with the welcome
                self._changed.set()
                why = await session.lasts()
                self._session = None
                self._turn.lost()
                self._send_as_told()
                if self._failure is not None or self._is_closed:
                    return
                if self._turn.left is None:
                    self._log.warning("the gradient server was lost", error=str(why))
                    await self._pause(why, was_of_use=self._was_of_use or time.monotonic() - joined > MOST_SECONDS)
        except Exception as error:
            self._fail(error)

    async def _connect(self) -> Session:
        """Tries until there is one."""
        while True:
            try:
                async with asyncio.timeout(_TRY_SECONDS):
                    return await self._join()
            except ServerRefused as error:
                if error.reason not in _PASSING:
                    raise
                why: Exception = error
            except (LinkLost, WireError, TimeoutError) as error:
                if is_hopeless(error):
                    raise PeerLost(f"the gradient server at {self.address} is not the right one: {error}") from error
                why = error
            await self._pause(why)

    async def _pause(self, why: Exception | None, *, was_of_use: bool = False) -> None:
        """Before the next try. A connection that is lost as soon as it was made is one more that failed."""
        if was_of_use:
            self._backoff.reset()
            self._failing_since = time.monotonic()
            return
        if time.monotonic() > self._failing_since + self._give_up_seconds:
            raise PeerLost(
                f"the gradient server at {self.address} was not there for {self._give_up_seconds:g} s: {why}"
            ) from None
        await asyncio.sleep(self._backoff.next())

    async def _join(self) -> Session:
        link = await connect(self.address, timeout=_TRY_SECONDS, tls=self._tls)
        turn = self._turn
        application = WorkerHandshake(self._token, self.node_id, step=turn.next_step, has_state=turn.has_state)
        session = Session(link, application, self._hear)
        try:
            self.worker_id = (await session.join()).worker_id
        except BaseException as error:
            session.abort(error if isinstance(error, Exception) else LinkLost("the join was broken off"))
            raise
        return session

    def _hear(self, item: Item) -> memoryview | None:
        if isinstance(item, VectorBegins | VectorPiece | VectorEnds):
            return self._turn.hear(item)  # of an average: news only when all of it is there
        try:
            self._turn.hear(item)
        except (ServerRefused, Mismatch) as error:
            self._fail(error)
        if isinstance(item, AverageDone | StateDone):
            self._was_of_use = True
        self._send_as_told()
        self._changed.set()
        return None

    def _fail(self, error: Exception) -> None:
        """Nothing more will come."""
        self._failure = self._failure or error
        self._turn.lost()
        self._changed.set()

    async def _change(self) -> None:
        """Until something has happened."""
        if self._failure is not None:
            raise self._failure
        self._changed.clear()
        await self._changed.wait()
        if self._failure is not None:
            raise self._failure

    # What is sent of a share.

    def _send_as_told(self) -> None:
        """Begin to send the gradient, or begin anew, if it is wanted for an attempt or on a connection of its own."""
        share, wanted = self._turn.share, None
        if share is not None and self._turn.is_told and self._session is not None and self._outgoing is not None:
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


def is_hopeless(error: Exception) -> bool:
    """Whether another try would end as this one did."""
    is_impostor = isinstance(error, WireError) and error.reason is Reason.BAD_TOKEN
    return is_impostor or isinstance(error.__cause__, ssl.SSLCertVerificationError)
