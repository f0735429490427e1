"""The head start of `parallel3d launch -n N script`: torch is being imported before the command line is parsed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from runtime.launch.spec import WarmServer, warm_up

_MODULES = ("torch", "torch.distributed", "numpy", "uvloop", "parallel3d.rank_mesh")


def modules_for(script_args: Sequence[str]) -> tuple[str, ...]:
    """What ranks most likely import: once before the fork is cheaper than in each of them after it."""
    reads_yaml = any(arg.endswith((".yaml", ".yml")) for arg in script_args)
    return (*_MODULES, "parallel3d.config") if reads_yaml else _MODULES


def head_start(arguments: Sequence[str]) -> WarmServer | None:
    """A server for the plainest form of the command; every other form, and every mistake, takes the usual way."""
    match [argument for argument in arguments[:4] if argument != "--no-prefix"] + list(arguments[4:]):
        case ["launch", "-n", count, script, *rest] if count.isdecimal() and int(count) > 0:
            if not script.startswith("-") and Path(script).is_file():
                open_standard_fds()
                return warm_up(int(count), modules_for(rest), os.environ)
    return None


def open_standard_fds() -> None:
    """Started with stdout closed (`>&-`), a file of ours would get its number, and then the ranks' output."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(fd)
