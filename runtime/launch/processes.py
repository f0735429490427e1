"""Process control on Linux: death with the parent, descendants, and ending them."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_SECONDS = 0.005


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}, {value}): {os.strerror(number)}")


def die_with_parent(parent: int, number: signal.Signals) -> None:
    """Get signal `number` when the thread that forked this process ends; at once if it has ended already."""
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def become_subreaper() -> None:
    """Orphaned descendants, also those that called setsid, become children of this process instead of init."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _all_pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def _parent_of(pid: int) -> int | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The second field is the command in brackets and may itself hold brackets and blanks.
            return int(file.read().rpartition(b")")[2].split()[1])
    except (OSError, IndexError):
        return None


def descendants(root: int) -> list[int]:
    """All descendants of `root`, from one pass over /proc (the kernel's list of children is optional)."""
    children: dict[int | None, list[int]] = {}
    for pid in _all_pids():
        children.setdefault(_parent_of(pid), []).append(pid)
    found = list(children.get(root, ()))
    for pid in found:
        found.extend(children.get(pid, ()))
    return found


def marked(variable: str, value: str) -> list[int]:
    """Processes of this user that were started with this environment variable; fork and exec keep it."""
    needle = f"{variable}={value}".encode()
    return [pid for pid in _all_pids() if pid != os.getpid() and needle in _environment_of(pid)]


def _environment_of(pid: int) -> list[bytes]:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read().split(b"\0")
    except OSError:
        return []


def kill_each(pids: Iterable[int], number: signal.Signals = signal.SIGKILL) -> None:
    """Signal each process; ignores those that are gone or belong to another user."""
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def reap() -> Iterator[tuple[int, int]]:
    """(pid, wait status) of each child that has ended; does not wait."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, status


def end_descendants(seconds: float = 10.0, spare: Collection[int] = ()) -> list[int]:
    """SIGKILL and reap all descendants of this process; returns those that did not end in time.

    Each round finds the children of those killed in the previous one, which this process has inherited.
    Only for a subreaper whose children all belong to one launch, except `spare` and their descendants.
    """
    deadline = time.monotonic() + seconds
    while True:
        for _ in reap():
            pass
        spared = {pid for each in spare for pid in (each, *descendants(each))}
        left = [pid for pid in descendants(os.getpid()) if pid not in spared]
        if not left or time.monotonic() > deadline:
            return left
        kill_each(left)
        time.sleep(_POLL_SECONDS)


def end_marked(variable: str, value: str, seconds: float = 5.0) -> list[int]:
    """SIGKILL every process with this variable; returns those that did not end in time, without zombies."""
    deadline = time.monotonic() + seconds
    while True:
        left = marked(variable, value)
        if not left or time.monotonic() > deadline:
            return left
        kill_each(left)
        time.sleep(_POLL_SECONDS)
