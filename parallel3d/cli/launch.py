"""`parallel3d launch`: N ranks of a script on this host."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from parallel3d import exit_codes
from parallel3d.cli.process import modules_for, no_process_left, on_signals, open_standard_fds

if TYPE_CHECKING:
    from runtime.launch.launch import OnMessage
    from runtime.launch.spec import LaunchResult, LaunchSpec, Started, WarmServer

_SHADOW_CHECK = "parallel3d.shadows:refuse_shadows"


def register(app: typer.Typer) -> None:
    """Add the verb. Its own options come before the script; all that follows is the script's."""
    app.command("launch", context_settings={"allow_interspersed_args": False})(launch)


def launch(
    context: typer.Context,
    script: Annotated[str, typer.Argument(help="The script every rank runs; with -m a module.")],
    num_ranks: Annotated[int, typer.Option("-n", "--ranks", help="How many ranks.")],
    args: Annotated[list[str] | None, typer.Argument(help="Passed to the script as they are.")] = None,
    module: Annotated[bool, typer.Option("-m", "--module", help="Run a module, as `python -m` does.")] = False,
    log_dir: Annotated[Path | None, typer.Option(help="Also write rank0.log, rank1.log, ... here.")] = None,
    no_prefix: Annotated[bool, typer.Option("--no-prefix", help="Lines without the rank in front.")] = False,
    only: Annotated[str | None, typer.Option(help="Show only these ranks, such as 0 or 0,3-5.")] = None,
    grace: Annotated[float, typer.Option(min=0.0, help="Seconds ranks have to end after Ctrl-C.")] = 10.0,
    metrics_port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Serve /metrics on this loopback port; 0: a free one."),
    ] = None,
    preload: Annotated[str | None, typer.Option(hidden=True, help="Modules imported once for all ranks.")] = None,
) -> None:
    """Run N ranks of a script: the first failure is shown first, Ctrl-C ends them in order, twice at once."""
    from runtime.errors import LaunchError
    from runtime.launch.script import Target
    from runtime.launch.spec import LaunchSpec, parse_ranks, prepare

    open_standard_fds()
    spec = LaunchSpec(
        target=Target(script, module, tuple(args or ())),
        num_ranks=num_ranks,
        preload=modules_for(args or ()) if preload is None else tuple(filter(None, preload.split(","))),
        before_script=_SHADOW_CHECK,
        interrupt_grace=grace,
        log_dir=log_dir,
        with_prefix=not no_prefix,
    )
    try:
        spec.check()
        spec = replace(spec, only=parse_ranks(only, num_ranks) if only is not None else None)
        logs = prepare(spec)
    except LaunchError as error:
        print(f"parallel3d launch: {error}", file=sys.stderr)
        raise typer.Exit(exit_codes.USAGE) from None
    raise typer.Exit(_run(spec, logs, metrics_port, context.obj))


def _run(spec: LaunchSpec, logs: tuple[int, ...], metrics_port: int | None, warm: WarmServer | None) -> int:
    from runtime.launch.spec import start

    early = [warm.server.process.pid] if warm is not None else []
    with no_process_left(early), _serve_metrics(metrics_port, spec.num_ranks) as on_message:
        result = _finish(start(spec, logs, warm), on_message)
    with suppress(OSError):
        sys.stderr.write(result.report)
        sys.stderr.flush()
    return result.exit_code


@contextmanager
def _serve_metrics(port: int | None, num_ranks: int) -> Iterator[OnMessage | None]:
    """Serve `/metrics` meanwhile; gives the function that takes the ranks' messages."""
    if port is None:
        yield None
        return
    import time

    from monitoring.analysis.facts import RunFacts
    from monitoring.assemble import open_monitor
    from monitoring.http.endpoint import Endpoint
    from monitoring.messages import receive
    from parallel3d import __version__

    try:
        endpoint = Endpoint.open("127.0.0.1", port or None)
    except OSError as error:
        said = os.strerror(error.errno) if error.errno else str(error)
        print(f"parallel3d launch: --metrics-port {port}: {said}", file=sys.stderr)
        raise typer.Exit(exit_codes.USAGE) from None
    # Only the number of ranks is known, because scripts make their own meshes.
    facts = RunFacts(world_size=num_ranks, version=__version__, started=time.time())
    monitor, _ = open_monitor(facts, endpoint)
    try:
        print(f"metrics: {endpoint.url('/metrics')}", file=sys.stderr, flush=True)
        yield lambda rank, message: monitor.take(rank, receive(rank, message))
    finally:
        monitor.close_now()


def _finish(started: Started, on_message: OnMessage | None) -> LaunchResult:
    from runtime.launch.launch import Launch, ignore_message  # only now: while the fork server imports too
    from runtime.loop import run_on_uvloop

    running = Launch(started, on_message or ignore_message)
    has_printed = False

    def interrupt(number: signal.Signals) -> None:
        nonlocal has_printed
        if not has_printed and sys.stderr.isatty():
            print("parallel3d: the ranks have been told to stop; Ctrl-C again kills them.", file=sys.stderr)
        has_printed = True
        running.interrupt(number)

    async def watch() -> LaunchResult:
        on_signals(interrupt)
        return await running.finish()

    return run_on_uvloop(watch())
