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

from parallel3d.cli.early import modules_for, open_standard_fds

if TYPE_CHECKING:
    from runtime.launch.launch import OnMessage
    from runtime.launch.spec import LaunchResult, LaunchSpec, Started, WarmServer

EXIT_USAGE = 2
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
    from runtime.launch.output import parse_ranks
    from runtime.launch.script import Target
    from runtime.launch.spec import LaunchSpec, prepare

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
        raise typer.Exit(EXIT_USAGE) from None
    raise typer.Exit(_run(spec, logs, metrics_port, context.obj))


def _run(spec: LaunchSpec, logs: tuple[int, ...], metrics_port: int | None, warm: WarmServer | None) -> int:
    from runtime.launch import processes
    from runtime.launch.spec import start

    # A shell that has `exec`ed us leaves us its children; they are not ours to end.
    strangers = set(processes.descendants(os.getpid())) - ({warm.server.process.pid} if warm else set())
    processes.become_subreaper()  # should the fork server be killed, its orphans come to us
    try:
        with _serve_metrics(metrics_port, spec.num_ranks) as on_message:
            result = _finish(start(spec, logs, warm), on_message)
    finally:
        processes.end_descendants(spare=strangers)
    with suppress(OSError):
        sys.stderr.write(result.report)
        sys.stderr.flush()
    return result.exit_code


@contextmanager
def _serve_metrics(port: int | None, num_ranks: int) -> Iterator[OnMessage | None]:
    """Gives what takes the ranks' reports, while `/metrics` shows them."""
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
        raise typer.Exit(EXIT_USAGE) from None
    # Scripts make their own meshes, so nothing but the number of ranks is known of them.
    facts = RunFacts(world_size=num_ranks, version=__version__, started=time.time())
    monitor, _ = open_monitor(facts, endpoint)
    try:
        print(f"metrics: {endpoint.url('/metrics')}", file=sys.stderr, flush=True)
        yield lambda rank, message: monitor.take(rank, receive(rank, message))
    finally:
        monitor.close_now()


def _finish(started: Started, on_message: OnMessage | None) -> LaunchResult:
    import asyncio  # only now: these overlap with the fork server's own imports

    import uvloop

    from runtime.launch.launch import Launch, ignore_message

    running = Launch(started, on_message or ignore_message)

    told = False

    def interrupt(number: signal.Signals) -> None:
        nonlocal told
        if not told and sys.stderr.isatty():
            print("parallel3d: the ranks have been told to stop; Ctrl-C again kills them.", file=sys.stderr)
        told = True
        running.interrupt(number)

    async def watch() -> LaunchResult:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue  # nohup
            loop.add_signal_handler(number, interrupt, number)
        return await running.finish()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(watch())
