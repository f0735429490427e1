"""`parallel3d run`: trains what a YAML file describes, on as many ranks as it says."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from parallel3d import exit_codes
from parallel3d.cli.process import no_process_left, on_signals, open_standard_fds
from parallel3d.cli.validate import errors_as_json, parse_settings
from parallel3d.config import RunConfig, load_config, locate
from runtime.errors import ConfigError

if TYPE_CHECKING:
    from monitoring.messages import RunStep
    from parallel3d.cli.run_text import LiveLine
    from parallel3d.planning.preflight import Locate
    from parallel3d.runs.lifecycle import RunLifecycle
    from parallel3d.runs.supervised import Run
    from runtime.environment import RankEnvironment


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("run")(run)


def run(
    file: Annotated[Path, typer.Argument(help="The run's YAML file.", show_default=False)],
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a key, such as train.steps=100. Repeatable."),
    ] = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="The folder to write, new or empty; else runs/<run_id>.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the content of metrics.json at the end.")] = False,
) -> None:
    """Train what a YAML file describes. Under torchrun or SLURM this process is one of the ranks.

    Exit codes: 0 well, 3 bad configuration, 4 the run failed, 124 a hang was cut, 130 interrupted.
    """
    open_standard_fds()
    overrides = parse_settings(settings or [])
    if run_dir is not None:
        overrides["runtime.run_dir"] = json.dumps(str(run_dir))  # as YAML would quote it
    place = "--run-dir" if run_dir is not None else str(file)
    with errors_as_json(as_json):
        raise typer.Exit(_run(file, overrides, place, as_json))


def _run(file: Path, overrides: Mapping[str, str], place: str, as_json: bool) -> int:
    from runtime.environment import is_rank

    if is_rank(os.environ):
        return _run_rank(file, overrides, place, as_json)
    return _supervise(load_config(file, overrides=overrides), partial(locate, file, overrides), place, as_json)


def _announce(lifecycle: RunLifecycle) -> None:
    from parallel3d.runs.endpoint import page_to_show

    print(f"run {lifecycle.run_id}: {lifecycle.folder.path}/", file=sys.stderr, flush=True)
    if (page := page_to_show(lifecycle.endpoints, lifecycle.config)) is not None:
        print(f"page: {page}", file=sys.stderr, flush=True)


# With a supervisor.


def _supervise(config: RunConfig, locate: Locate, place: str, as_json: bool) -> int:
    from parallel3d.cli.run_text import LiveLine, print_summary
    from parallel3d.runs.supervised import Run
    from runtime.loop import run_on_uvloop

    live = LiveLine.on_stderr()

    def show(step: RunStep) -> None:
        live.show(training.record, step, training.bubble)

    training = Run(config, locate=locate, place=place, on_step=show)
    with no_process_left(), training.prepared():
        run_on_uvloop(_watch(training))
        live.close()
        _print_failure(training)
        print_summary(training.record, training.folder, training.metrics(), as_json)
        return training.exit_code


async def _watch(training: Run) -> None:
    from runtime.errors import RunFailed

    def interrupt(number: signal.Signals) -> None:
        if sys.stderr.isatty():
            print("\nparallel3d: stopping after this step; Ctrl-C again ends it at once.", file=sys.stderr)
        training.interrupt(number)

    with suppress(RunFailed):  # printed after the live line
        async with training:
            on_signals(interrupt)
            _announce(training.lifecycle)
            await training.summary()


def _print_failure(training: Run) -> None:
    record, result = training.record, training.result
    with suppress(OSError):
        if result is not None and result.report:
            sys.stderr.write(result.report)
        elif record.error is not None:
            print(f"parallel3d: {record.error.message}", file=sys.stderr)


# As a rank that torchrun, SLURM or `parallel3d launch` has started.


def _run_rank(file: Path, overrides: Mapping[str, str], place: str, as_json: bool) -> int:
    from runtime.environment import read_environment

    environment = read_environment()
    try:
        lifecycle, live = _prepare_rank(file, overrides, place, environment)
    except ConfigError:
        if environment.local_rank == 0:  # on each host, whose files may differ
            raise
        return exit_codes.BAD_CONFIG

    import traceback

    from parallel3d.cli.run_text import print_summary
    from parallel3d.runs.torchrun_rank import RankReporter
    from parallel3d.training.coordinator import Coordinator
    from runtime.loop import run

    reporter = RankReporter(environment.rank, lifecycle)
    try:
        with redirect_stdout(sys.stderr):
            run(lambda: reporter.work(Coordinator.from_config))
    except Exception:
        traceback.print_exc()
    finally:
        live.close()
        if environment.rank == 0:
            print_summary(lifecycle.record, lifecycle.folder.path, lifecycle.metrics(), as_json)
    return lifecycle.exit_code


def _prepare_rank(
    file: Path, overrides: Mapping[str, str], place: str, environment: RankEnvironment
) -> tuple[RunLifecycle, LiveLine]:
    """Only rank 0's lifecycle gets an endpoint and a folder."""
    from parallel3d.cli.run_text import LiveLine
    from parallel3d.planning.preflight import check_before_start
    from parallel3d.runs.lifecycle import RunLifecycle

    live = LiveLine.on_stderr()

    def show(step: RunStep) -> None:
        live.show(lifecycle.record, step, lifecycle.bubble)

    find = partial(locate, file, overrides)
    config = load_config(file, overrides=overrides, world_size=environment.world_size)
    lifecycle = RunLifecycle(config, place=place, on_step=show)
    if environment.rank == 0:  # other ranks may find what rank 0 has written by now
        lifecycle.check_folder()
    with redirect_stdout(sys.stderr):  # stdout is for data, not for what the user's factories print
        lifecycle.record.facts = check_before_start(config, find, environment.local_world_size)
    if environment.rank == 0:
        lifecycle.open_endpoint(find)
        lifecycle.create_folder()
        _announce(lifecycle)
    return lifecycle, live
