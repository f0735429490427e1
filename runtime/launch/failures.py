"""How ranks failed, which failure is the root, and the text about them."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runtime.errors import Coords, name_rank

# Errors that a rank gets because another one failed.
CONSEQUENCES = frozenset({"PeerLost", "GroupClosed", "DeadlineExceeded"})
# Errors with which a rank usually ends when it is asked to stop.
_ANSWERS_TO_INTERRUPT = frozenset({"KeyboardInterrupt", "CancelledError"})


@dataclass(frozen=True, slots=True)
class Report:
    """A rank's own report of its uncaught exception."""

    time: float
    type: str
    message: str
    traceback: str
    is_consequence: bool = False
    """Whether another rank caused it: that rank's report says more."""
    error_kind: str | None = None
    """The class of the CommunicationError behind it, if nothing else went wrong on this rank."""
    notes: tuple[str, ...] = ()
    """The exception's notes, such as the layer that it came from; the traceback ends with them."""

    @staticmethod
    def from_message(message: Mapping[str, Any], rank: int) -> Report | None:
        """The report in a rank's message. None if a field is missing or has a wrong type: a rank may send anything."""
        time = message.get("time")
        texts = [message.get(name) for name in ("type", "message", "traceback")]
        if not isinstance(time, int | float) or not all(isinstance(text, str) for text in texts):
            return None
        kind, text, traceback = (str(each) for each in texts)
        error = message.get("error")
        wire_kind = error.get("kind") if isinstance(error, dict) else None
        error_kind = wire_kind if isinstance(wire_kind, str) else None
        is_consequence = message.get("culprit") not in (None, rank) or error_kind in CONSEQUENCES
        found = message.get("notes")
        notes = tuple(note for note in found if isinstance(note, str)) if isinstance(found, list) else ()
        return Report(float(time), kind, text, traceback, is_consequence, error_kind, notes)

    @property
    def summary(self) -> str:
        first, _, rest = self.message.partition("\n")
        return f"{self.type}: {first}{' ...' if rest else ''}" if self.message else self.type


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed rank."""

    rank: int
    coords: Coords | None
    time: float
    """CLOCK_MONOTONIC: when it reported its error, otherwise when its end was noticed."""
    exit_code: int
    """As in a shell: 128 + n if signal n killed it."""
    how: str
    """`killed by SIGKILL`, `exited with code 3`, or the exception in one line."""
    report: Report | None
    is_consequence: bool
    was_stopped: bool
    """The launcher ended it, because of another failure or Ctrl-C."""

    @property
    def name(self) -> str:
        return name_rank(self.rank, self.coords)


def shell_code(code: int) -> int:
    """The shell's exit code for a wait code, which is minus the signal's number."""
    return code if code >= 0 else 128 - code


def describe_exit(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def find_root(failures: Iterable[Failure]) -> Failure | None:
    """The earliest failure that is not a consequence of another; if all are, the earliest."""
    return min(failures, key=lambda failure: (failure.is_consequence, failure.time), default=None)


def render(root: Failure, failures: Sequence[Failure]) -> str:
    """The root failure with its traceback, then one line for each other failed rank."""
    others = [failure for failure in failures if failure is not root]
    lines = [f"parallel3d: {root.name} failed first: {root.how}"]
    if root.report is not None:
        lines.append(root.report.traceback.rstrip("\n"))
    lines += [f"parallel3d: {failure.name}: {failure.how}" for failure in others if not failure.was_stopped]
    num_stopped = sum(failure.was_stopped for failure in others)
    if num_stopped:
        lines.append(f"parallel3d: {num_stopped} other rank{'s were' * (num_stopped > 1) or ' was'} stopped.")
    return "\n".join(lines) + "\n"


def render_interrupted(number: signal.Signals, failures: Sequence[Failure]) -> str:
    """What went wrong while ranks were stopping; normal stops are left out."""
    lines = [f"parallel3d: interrupted by {number.name}; all ranks have ended."]
    for failure in failures:
        report = failure.report
        if failure.was_stopped and failure.exit_code == 128 + signal.SIGKILL:
            lines.append(f"parallel3d: {failure.name} had not stopped yet and was killed.")
        elif report and not report.is_consequence and report.type not in _ANSWERS_TO_INTERRUPT:
            lines += [f"parallel3d: {failure.name} failed: {failure.how}", report.traceback.rstrip("\n")]
    return "\n".join(lines) + "\n"
