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

from parallel3d.cli.early import open_standard_fds
from parallel3d.cli.validate import EXIT_BAD_CONFIG, parse_settings
from parallel3d.config import RunConfig, load_config, locate
from parallel3d.config.errors import ConfigProblems
from runtime.errors import ConfigError

if TYPE_CHECKING:
    from monitoring.http.endpoint import Endpoint
    from monitoring.messages import RunStep
    from parallel3d.planning.preflight import Locate, ModelFacts
    from parallel3d.runs.supervised import Run
    from runtime.launch.spec import WarmServer


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
    try:
        raise typer.Exit(_run(file, overrides, place, as_json))
    except ConfigError as error:
        if not as_json or not isinstance(error, ConfigProblems):
            raise
        print(json.dumps({"errors": [problem.to_json() for problem in error.problems]}, indent=2))
        raise typer.Exit(EXIT_BAD_CONFIG) from None


def _run(file: Path, overrides: Mapping[str, str], place: str, as_json: bool) -> int:
    from runtime.environment import is_rank

    if is_rank(os.environ):
        from parallel3d.cli.run_as_rank import run_as_rank

        return run_as_rank(file, overrides, place, as_json)
    return _supervise(load_config(file, overrides=overrides), partial(locate, file, overrides), place, as_json)


def _supervise(config: RunConfig, locate: Locate, place: str, as_json: bool) -> int:
    from parallel3d.planning.preflight import check_before_start
    from parallel3d.runs.endpoint import open_endpoint
    from parallel3d.runs.folder import check_run_dir
    from parallel3d.runs.supervised import warm_up_for
    from runtime.launch import processes

    check_run_dir(config, place)
    endpoint = open_endpoint(config, locate)  # before anything is started: its port may be taken
    strangers = set(processes.descendants(os.getpid()))  # a shell that has `exec`ed us leaves us its children
    processes.become_subreaper()  # should the fork server be killed, its orphans come to us
    try:
        warm = warm_up_for(config)  # imports torch while this process does
        try:
            with redirect_stdout(sys.stderr):  # what a factory of the user's prints is not our data
                facts = check_before_start(config, locate)
            return _train(config, place, facts, warm, endpoint, as_json)
        finally:
            warm.discard()
            if endpoint is not None:
                endpoint.close()
    finally:
        processes.end_descendants(spare=strangers)


def _train(
    config: RunConfig, place: str, facts: ModelFacts, warm: WarmServer, endpoint: Endpoint | None, as_json: bool
) -> int:
    import asyncio
    import shutil

    import uvloop

    from parallel3d.cli.run_text import LiveLine
    from parallel3d.runs.supervised import Run

    live = LiveLine(sys.stderr, os.environ, shutil.get_terminal_size().columns)

    def show(step: RunStep) -> None:
        live.show(training.record, step, training.bubble)

    training = Run(config, place=place, facts=facts, warm=warm, on_step=show, open_endpoint=lambda: endpoint)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_watch(training))
    live.close()
    _say_the_end(training, as_json)
    return training.exit_code


async def _watch(training: Run) -> None:
    import asyncio

    from parallel3d.runs.endpoint import page_to_show
    from runtime.errors import RunFailed

    loop = asyncio.get_running_loop()

    def interrupt(number: signal.Signals) -> None:
        if sys.stderr.isatty():
            print("\nparallel3d: stopping after this step; Ctrl-C again ends it at once.", file=sys.stderr)
        training.interrupt(number)

    try:
        async with training:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                    continue  # nohup
                loop.add_signal_handler(number, interrupt, number)
            print(f"run {training.run_id}: {training.folder}/", file=sys.stderr, flush=True)
            if (page := page_to_show(training.endpoints, training.config)) is not None:
                print(f"page: {page}", file=sys.stderr, flush=True)
            await training.summary()
    except RunFailed:
        pass  # told below, with all that is known


def _say_the_end(training: Run, as_json: bool) -> None:
    from parallel3d.cli.run_text import say_summary

    record, result = training.record, training.result
    with suppress(OSError):
        if result is not None and result.report:
            sys.stderr.write(result.report)
        elif record.error is not None:
            print(f"parallel3d: {record.error.message}", file=sys.stderr)
    say_summary(record, training.folder, training.metrics(), as_json)
