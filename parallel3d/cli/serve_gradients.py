"""`parallel3d serve-gradients`: averages the gradients of workers that can reach nothing but this address. No torch."""

from __future__ import annotations

import signal
import sys
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from parallel3d import exit_codes
from parallel3d.cli.process import on_signals, open_standard_fds

if TYPE_CHECKING:
    import ssl

    from aiohttp import web

    from monitoring.http.service import Service
    from runtime.gradient_server.server import GradientServer, ServerSummary, StepRecord
    from runtime.gradient_server.settings import GradientServerSettings


class Protocol(StrEnum):
    V1 = "v1"
    V2 = "v2"


class Policy(StrEnum):
    HALT = "halt"
    GO_ON = "go-on"


class Shares(StrEnum):
    EVEN = "even"
    BY_SPEED = "by-speed"


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("serve-gradients")(serve_gradients)


def serve_gradients(
    workers: Annotated[int, typer.Option(min=1, help="That are waited for before the first step.", show_default=False)],
    samples: Annotated[int, typer.Option(min=1, help="Of each step, all workers together.", show_default=False)],
    bind: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="The address to listen on; port 0: a free one.")
    ] = "127.0.0.1:9000",
    steps: Annotated[int | None, typer.Option(min=1, help="Then it ends.", show_default="until stopped")] = None,
    protocol: Annotated[
        Protocol,
        typer.Option(help="v1: take workers of version 1 from other hosts and beside a token: they prove nothing."),
    ] = Protocol.V2,
    token_file: Annotated[
        Path | None, typer.Option(help="What workers have to know.", show_default="none, on loopback only")
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="Speak TLS, with this certificate.", show_default=False)] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its key.", show_default=False)] = None,
    policy: Annotated[
        Policy, typer.Option(help="When a gradient is refused: halt, or go on without that worker.")
    ] = Policy.HALT,
    shares: Annotated[
        Shares, typer.Option(help="Shares of the samples: even, or by the speed that workers have shown.")
    ] = Shares.EVEN,
    min_workers: Annotated[int, typer.Option(min=1, help="With fewer, no step is begun.")] = 1,
    join_seconds: Annotated[float, typer.Option(help="For the workers to join.")] = 60.0,
    rejoin_seconds: Annotated[float, typer.Option(help="For a lost worker to come back.")] = 10.0,
    timeout_seconds: Annotated[float, typer.Option(help="A worker that is silent for so long is lost.")] = 30.0,
    step_timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="A worker whose gradient takes longer is refused.")
    ] = 1800.0,
    compression: Annotated[bool, typer.Option("--compression", help="Pack gradients, for slow networks.")] = False,
    metrics_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Serve /metrics on this loopback port; 0: a free one.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a summary as JSON at the end.")] = False,
) -> None:
    """Hand out shares of each step's samples to workers (parallel3d join), and average their gradients.

    Exit codes: 0 well, 3 bad options, 4 too few workers came, one was lost for good, or a gradient was refused, 130
    interrupted.
    """
    open_standard_fds()
    from runtime.gradient_server.settings import GradientServerSettings
    from runtime.gradient_server.wire.auth import read_token

    host, port = split_bind(bind)
    settings = GradientServerSettings(
        workers=workers,
        samples=samples,
        host=host,
        port=port,
        steps=steps,
        protocol="v1" if protocol is Protocol.V1 else "v2",
        token=None if token_file is None else read_token(str(token_file)),
        tls=_tls(tls_cert, tls_key),
        policy="halt" if policy is Policy.HALT else "go on",
        shares="even" if shares is Shares.EVEN else "by speed",
        min_workers=min_workers,
        join_seconds=join_seconds,
        rejoin_seconds=rejoin_seconds,
        timeout_seconds=timeout_seconds,
        step_seconds=step_timeout,
        heartbeat_seconds=min(5.0, timeout_seconds / 3),
        compression=compression,
    )
    raise typer.Exit(_serve(settings, metrics_port, as_json))


def split_bind(bind: str) -> tuple[str, int]:
    """Host and port, which may be 0."""
    from runtime.errors import ConfigError, InvalidCall
    from runtime.gradient_server.wire.link import split_address

    is_any = bind.endswith(":0")
    try:
        host, port = split_address(bind.removesuffix(":0") if is_any else bind)
    except InvalidCall as error:
        raise ConfigError(f"--bind {error}") from None
    return host, 0 if is_any else port


def _tls(certificate: Path | None, key: Path | None) -> ssl.SSLContext | None:
    from monitoring.http.endpoint import tls_context
    from runtime.errors import ConfigError

    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise ConfigError("--tls-cert and --tls-key belong together: give both.")
    try:
        return tls_context(str(certificate), str(key))
    except OSError as error:
        why = error.strerror or str(error)
        raise ConfigError(f"--tls-cert {certificate}, --tls-key {key}: no pair that can be used: {why}.") from None


def _serve(settings: GradientServerSettings, metrics_port: int | None, as_json: bool) -> int:
    from parallel3d.formatting import json_lines
    from runtime.errors import LaunchError, Parallel3DError
    from runtime.loop import run_on_uvloop

    try:
        summary, number = run_on_uvloop(_answer(settings, metrics_port))
    except LaunchError:
        raise
    except Parallel3DError as error:
        print(f"parallel3d serve-gradients: {error}", file=sys.stderr)
        if as_json:
            print(json_lines({"status": "failed", "error": str(error)}))
        return exit_codes.FAILED
    status = "completed" if number is None else "interrupted"
    if as_json:
        print(json_lines({"status": status, **asdict(summary)}))
    print(f"{status}: {summary.reason}; {summary.steps} steps", file=sys.stderr if as_json else sys.stdout)
    return exit_codes.OK if number is None else exit_codes.of_signal(number)


async def _answer(
    settings: GradientServerSettings, metrics_port: int | None
) -> tuple[ServerSummary, signal.Signals | None]:
    from parallel3d.cli.run_text import Line
    from runtime.gradient_server.server import GradientServer

    got: list[signal.Signals] = []
    line = Line.on_stderr()

    def interrupt(number: signal.Signals) -> None:
        got.append(number)
        if len(got) == 1:
            server.stop(f"the server was told to stop by {number.name}")
        else:
            server.hang_up()

    server = GradientServer(settings, on_step=lambda record: line.update(_pairs(record, settings.steps)))
    async with server:
        on_signals(interrupt)
        print(f"gradient server: {server.address}", file=sys.stderr, flush=True)
        metrics = _serve_metrics(server, metrics_port)
        try:
            return await server.finished(), got[0] if got else None
        finally:
            line.close()
            if metrics is not None:
                await metrics.close()


def _serve_metrics(server: GradientServer, port: int | None) -> Service | None:
    if port is None:
        return None
    from monitoring.http.endpoint import Endpoint
    from monitoring.http.service import Service
    from monitoring.prometheus.gradient_server_metrics import GradientServerMetrics
    from runtime.errors import LaunchError

    try:
        endpoint = Endpoint.open("127.0.0.1", port or None)
    except OSError as error:
        raise LaunchError(f"--metrics-port {port}: {error.strerror or error}") from None
    print(f"metrics: {endpoint.url('/metrics')}", file=sys.stderr, flush=True)

    def make_app() -> web.Application:
        from monitoring.http.server import make_app

        return make_app(endpoint, GradientServerMetrics(server.figures))

    return Service("parallel3d-metrics", endpoint, make_app)


def _pairs(record: StepRecord, steps: int | None) -> list[tuple[str, str]]:
    """Names and values of a step for the live line."""
    made = record.step + 1
    return [
        ("step", str(made) if steps is None else f"{made:>{len(str(steps))}}/{steps}"),
        ("loss", f"{record.loss:.4f}"),
        ("workers", str(len(record.shares))),
        ("reduced in", f"{1e3 * record.seconds:.1f} ms"),
    ]
