"""`parallel3d bench`: measures our collectives on this machine, beside gloo and MPI."""

from __future__ import annotations

import inspect
import json
import os
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from parallel3d import exit_codes
from parallel3d.cli.process import no_process_left

if TYPE_CHECKING:
    from parallel3d.benchmarks.mpirun import Mpi
    from parallel3d.benchmarks.plan import Plan
    from parallel3d.benchmarks.results import Run

T = TypeVar("T")

_LONGEST_FOLDER = 60  # the path of a Unix socket has at most 107 bytes


def register(app: typer.Typer) -> None:
    """Add the verb."""
    group = typer.Typer(help="Measure ours beside what you would use instead.", no_args_is_help=True)
    group.command("collectives", help=_paragraphs(collectives.__doc__ or ""))(collectives)
    app.add_typer(group, name="bench")


def _paragraphs(docstring: str) -> str:
    """One line per paragraph, so that the terminal's width decides where it is broken."""
    return re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.cleandoc(docstring))


def collectives(
    ranks: Annotated[
        list[str] | None,
        typer.Option("-n", "--ranks", help="How many ranks, such as 2 or 2,4,8; repeatable.", show_default="2"),
    ] = None,
    sizes: Annotated[
        str | None,
        typer.Option(
            help="Sizes of the tensor, such as 4, 64KiB or 1MB.", show_default="4,4KiB,64KiB,1MiB,16MiB,64MiB,256MiB"
        ),
    ] = None,
    strategies: Annotated[
        str | None, typer.Option(help="Ours to measure, such as ring,tree.", show_default="all")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of the tensor's elements.")] = "float32",
    rounds: Annotated[
        int | None, typer.Option(help="In each, everybody has up to 7 short turns.", show_default="5; 3 if quick")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes, up to 16 MiB, and fewer repeats.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as one JSON object.")] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Also draw bandwidths and times to this file, such as bench.png.")
    ] = None,
) -> None:
    """All-reduce with every strategy, and send, beside gloo, MPI (where mpirun and mpi4py are there) and memory.

    All contestants take turns in one run, in several rounds: a round is the median of its turns, times are medians of
    the rounds, "min-max" the fastest and the slowest round, ratios medians of the rounds' own. "x gloo" is gloo's time
    over the contestant's: above 1 it is faster than gloo. "x mpi" is the same with MPI. The time of a call is that of
    its slowest rank, every rank has one torch thread, and sums are checked. The strategies work on registered tensors
    (group.empty), "shared" is the default one with one result for all ranks (all_reduce(shared=True)), "staged" the
    default one on a plain torch tensor. algbw is bytes / time and busbw = algbw * 2(n-1)/n, in GB/s = 10^9 bytes/s, as
    in nccl-tests.

    The memory limit is what the same bytes cost as plain add_ and copy_ without any waiting: for n ranks n*(n-1)
    add_ and as many copy_ of 1/n of the tensor, in pieces as large as ours, spread over one process for each core.
    Below 64 KiB it is the price of torch's calls and says little, so the table has "-" there; --json has it.

    docs/bench.md explains every column, the fields of the JSON and the picture.
    """
    from parallel3d.benchmarks.mpirun import find_mpi
    from parallel3d.benchmarks.plan import make_plan
    from parallel3d.benchmarks.plot import check_plot, draw
    from parallel3d.benchmarks.results import document, machine
    from runtime.errors import InvalidCall

    try:
        plan = make_plan(ranks or ["2"], sizes, strategies, dtype, rounds, quick)
        if plot is not None:
            check_plot(plot)
    except InvalidCall as error:
        print(f"parallel3d bench collectives: {error}", file=sys.stderr)
        raise typer.Exit(exit_codes.USAGE) from None
    notes: list[str] = []
    mpi = find_mpi(plan.dtype)
    if isinstance(mpi, str):
        _note(notes, f"mpi is left out: {mpi}")
    found = None if isinstance(mpi, str) else mpi
    facts = machine(found)
    show = _show_nothing if as_json else partial(_show, plan, facts)
    runs = _measure(plan, found, partial(_note, notes), show)
    if as_json:
        print(json.dumps(document(plan, facts, runs, notes), indent=2))
    if plot is not None:
        try:
            draw(plan, facts, runs, plot)
        except OSError as error:
            print(f"parallel3d bench collectives: --plot {plot}: {error.strerror}", file=sys.stderr)
            raise typer.Exit(exit_codes.ERROR) from None


def _note(notes: list[str], text: str) -> None:
    notes.append(text)
    print(f"parallel3d bench collectives: {text}", file=sys.stderr, flush=True)


def _show(plan: Plan, facts: Mapping[str, Any], run: Run) -> None:
    from parallel3d.benchmarks.results import headline
    from parallel3d.benchmarks.table import render

    if run.num_ranks == plan.ranks[0]:
        print(headline(facts))
    print(f"\n{render(run, plan.dtype, plan.rounds)}", flush=True)


def _show_nothing(run: Run) -> None:
    pass


def _measure(plan: Plan, mpi: Mpi | None, note: Callable[[str], None], show: Callable[[Run], None]) -> list[Run]:
    import asyncio

    from parallel3d.benchmarks.collectives import measure
    from runtime.loop import run

    async def main() -> list[Run]:
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, os.kill, os.getpid(), signal.SIGTERM)
        return await measure(plan, mpi, folder, progress, instead_of_progress(note), instead_of_progress(show))

    def instead_of_progress(show: Callable[[T], None]) -> Callable[[T], None]:
        """Clears the progress line first, which is in the same place on a terminal."""

        def clear_and_show(what: T) -> None:
            progress("")
            show(what)

        return clear_and_show

    with _private_folder() as folder, no_process_left(), _progress() as progress:
        return run(main)


@contextmanager
def _private_folder() -> Iterator[Path]:
    above = tempfile.gettempdir()
    with tempfile.TemporaryDirectory(
        prefix="parallel3d-bench-",
        dir=above if len(above) <= _LONGEST_FOLDER else "/tmp",
        ignore_cleanup_errors=True,
    ) as folder:
        yield Path(folder)


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Gives what shows a progress line on a terminal; "" clears it, and it is cleared in the end."""
    shown = 0

    def show(text: str) -> None:
        nonlocal shown
        print(f"\r{text.ljust(shown)}", end="" if text else "\r", file=sys.stderr, flush=True)
        shown = len(text)

    if not sys.stderr.isatty():
        yield lambda text: None
        return
    try:
        yield show
    finally:
        show("")
