"""One call under way: ended on the spot if it is quick, else awaited with an eye on deadline and peers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Generator
from dataclasses import dataclass
from typing import Protocol

import torch

from process_groups.call import Call, Completion
from runtime.errors import CommunicationError, DeadlineExceeded, PeerLost

_INLINE = 0.001  # seconds: small calls end sooner than a hand-over between threads would take
_LOOK = 0.1  # seconds between looks for trouble while a call is under way
_NAMING = 0.5  # seconds to find out who died: sockets close a moment before a process is seen dead


@dataclass(frozen=True, slots=True)
class CopyBack:
    """Where the result goes when the user's tensor is not contiguous."""

    staging: torch.Tensor
    to: torch.Tensor


class WorkOwner(Protocol):
    """The part of a group that its calls under way use, on the event loop's thread."""

    name: str

    def has_kept_the_loop(self) -> bool:
        """Whether the loop is due for a turn: awaits that never suspend starve timers and other tasks."""

    def trouble(self, call: Call) -> CommunicationError | None:
        """Why the call will never end."""

    def too_late(self, call: Call, seconds: float) -> CommunicationError:
        """The error for a call that did not end in time; names the rank that it waits for."""

    def settled(self, work: Work, error: CommunicationError | None) -> None:
        """The call has ended."""

    def fail(self, work: Work, error: CommunicationError) -> None:
        """Settle the call with an error, and abort the group."""

    def cancelled(self, call: Call) -> None:
        """The await was cancelled: abort the group."""


class Work:
    """A call under way. Awaiting it gives the resulting tensor; cancelling the await closes the group."""

    __slots__ = (
        "_completion", "_copies_back", "_copy_back", "_deadline", "_ended", "_error", "_owner", "_result", "_timer",
        "_unnamed", "_waiters", "began", "call",
    )  # fmt: skip

    def __init__(
        self,
        owner: WorkOwner,
        call: Call,
        result: torch.Tensor | None,
        copy_back: CopyBack | None,
        began: float,
        completion: Completion | None = None,
    ) -> None:
        self.call, self.began = call, began
        self._owner, self._result, self._copy_back, self._completion = owner, result, copy_back, completion
        self._copies_back = copy_back is not None
        self._deadline = began + call.timeout
        self._ended = False
        self._error: CommunicationError | None = None
        self._waiters: list[asyncio.Future[None]] | None = None
        self._unnamed: CommunicationError | None = None
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        how = "under way" if not self._ended else "ended" if self._error is None else "failed"
        return f"<Work: {self.call.describe()} on group {self._owner.name}, {how}>"

    def done(self) -> bool:
        """Whether the call has ended, well or not, as far as this rank's event loop knows."""
        if not self._ended and not self._ends_within(0.0):
            self.watch()
        return self._ended

    def hurry(self, deadline: float) -> None:
        """It fails at this moment of time.monotonic, if not before."""
        self._deadline = min(self._deadline, deadline)

    def ended_at(self) -> float:
        """When it ended, as far as that is known: it may have been before anybody looked."""
        known = None if self._completion is None else self._completion.ended_at
        return time.monotonic() if known is None else known

    def __await__(self) -> Generator[object, None, torch.Tensor]:
        if not self._ended and not self._ends_within(_INLINE):
            yield from self._wait().__await__()
        elif self._owner.has_kept_the_loop():
            yield None  # timers and other tasks have waited long enough
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]  # only a barrier has none, and nobody uses its value

    def _ends_within(self, seconds: float) -> bool:
        """A short attempt on the spot."""
        assert self._completion is not None
        if self._timer is not None and self._copies_back:
            return False  # the thread in which it ends copies back, and then tells the loop
        if not self._completion.ended_well(seconds):
            return False
        self.end_well()
        return True

    def end_well(self) -> None:
        """The bytes are where they belong; the loop's thread only."""
        if self._copy_back is not None:
            self._finish()
        self.settle(None)

    async def _wait(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiters = [*(self._waiters or ()), waiter]
        self.watch()
        try:
            await waiter
        except asyncio.CancelledError:
            if not self._ended:
                self._owner.cancelled(self.call)
            raise

    def watch(self) -> None:
        """Notify the loop when the call ends, or when it is known that it never will."""
        if self._timer is not None or self._ended:
            return
        loop, completion = asyncio.get_running_loop(), self._completion
        assert completion is not None

        def ended(_: Completion) -> None:  # in a thread of the transport
            if completion.exception() is None:
                self._finish()
            with contextlib.suppress(RuntimeError):  # the loop may be gone by now
                loop.call_soon_threadsafe(self._completed)

        self._timer = loop.call_later(min(_LOOK, self._deadline - time.monotonic()), self._look)
        completion.add_done_callback(ended)

    def _finish(self) -> None:
        copy_back, self._copy_back = self._copy_back, None  # once: the user may write there afterwards
        if copy_back is not None:
            with torch.inference_mode(copy_back.to.is_inference()):
                copy_back.to.copy_(copy_back.staging)

    def _completed(self) -> None:
        if self._ended:
            return
        assert self._completion is not None
        error = self._completion.exception()
        if error is None:
            self.settle(None)
        elif isinstance(error, PeerLost) and error.rank is None:
            self._unnamed, self._deadline = error, time.monotonic() + _NAMING
            self._look()
        elif isinstance(error, DeadlineExceeded) and error.action is None:  # the transport's own clock was first
            self._owner.fail(self, self._too_late())
        else:
            assert isinstance(error, CommunicationError), error
            self._owner.fail(self, error)

    def _look(self) -> None:
        if self._ended:
            return
        trouble = self._owner.trouble(self.call)
        left = self._deadline - time.monotonic()
        if trouble is None and left > 0:
            pause = _LOOK if self._unnamed is None else _LOOK / 20
            assert self._timer is not None
            self._timer.cancel()
            self._timer = asyncio.get_running_loop().call_later(min(pause, left), self._look)
        else:
            self._owner.fail(self, trouble or self._unnamed or self._too_late())

    def _too_late(self) -> CommunicationError:
        return self._owner.too_late(self.call, self._deadline - self.began)

    def settle(self, error: CommunicationError | None) -> None:
        """Decide how the call ended, once; the loop's thread only."""
        if self._ended:
            return
        self._ended, self._error = True, error
        if self.call.result is not None and self._result is not None:
            self._result = self.call.result.view(self._result.shape)
        if self._timer is not None:
            self._timer.cancel()
        self._owner.settled(self, error)
        for waiter in self._waiters or ():
            if not waiter.done():
                waiter.set_result(None)
