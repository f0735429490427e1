"""What verbs do to their own process: start torch's import early, open standard files, handle signals, end children.

Imported before the command line is parsed, so it imports little itself.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from runtime.launch.spec import WarmServer, warm_up

T = TypeVar("T")

_MODULES = ("torch", "torch.distributed", "numpy", "uvloop", "parallel3d.rank_mesh")


def head_start(arguments: Sequence[str]) -> WarmServer | None:
    """A fork server that imports torch while the command line of `parallel3d launch -n N script` is parsed.

    None for any other form of the command, and for any mistake in it.
    """
    match [argument for argument in arguments[:4] if argument != "--no-prefix"] + list(arguments[4:]):
        case ["launch", "-n", count, script, *rest] if count.isdecimal() and int(count) > 0:
            if not script.startswith("-") and Path(script).is_file():
                open_standard_fds()
                return warm_up(int(count), modules_for(rest), os.environ)
    return None


def modules_for(script_args: Sequence[str]) -> tuple[str, ...]:
    """What ranks most likely import: once before the fork is cheaper than in each of them after it."""
    reads_yaml = any(arg.endswith((".yaml", ".yml")) for arg in script_args)
    return (*_MODULES, "parallel3d.config") if reads_yaml else _MODULES


def open_standard_fds() -> None:
    """Open what was closed with `>&-`: a file of ours would get its number, and then the ranks' output."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(fd)


@contextmanager
def no_process_left(ours: Collection[int] = ()) -> Iterator[None]:
    """End every process that was started meanwhile, whatever happens. ours: older ones to end too."""
    from runtime.launch import processes

    # A shell that has `exec`ed us leaves us its children; they are not ours to end.
    strangers = set(processes.descendants(os.getpid())) - set(ours)
    processes.become_subreaper()  # if the fork server is killed, its orphans become our children
    try:
        yield
    finally:
        processes.end_descendants(spare=strangers)


def on_signals(handle: Callable[[signal.Signals], object]) -> None:
    """Let the running loop call this for SIGINT, SIGTERM and SIGHUP; under nohup, SIGHUP stays ignored."""
    import asyncio

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, handle, number)
