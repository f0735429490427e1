"""`parallel3d join`: trains what a YAML file describes as one worker of a gradient server."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from parallel3d.cli.early import open_standard_fds
from parallel3d.cli.validate import parse_settings
from parallel3d.config import RunConfig, load_config, locate
from runtime.errors import ConfigError
from runtime.gradient_server.wire.link import split_address

if TYPE_CHECKING:
    import ssl

    from parallel3d.cli.joined_run import JoinedRun
    from parallel3d.gradient_worker.worker import GradientWorker
    from parallel3d.planning.preflight import Locate

MakeWorker = Callable[[], "GradientWorker"]


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("join")(join)


def join(
    address: Annotated[str, typer.Argument(help="The server's HOST:PORT.", show_default=False)],
    file: Annotated[Path, typer.Argument(help="The run's YAML file, the same on all workers.", show_default=False)],
    token_file: Annotated[
        Path | None, typer.Option(help="The file with the run's token.", show_default="none, as on one host")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a key, such as runtime.threads=1. Repeatable."),
    ] = None,
    tls_ca: Annotated[
        Path | None, typer.Option(help="Speak TLS, and trust this certificate or authority.", show_default="no TLS")
    ] = None,
    node_id: Annotated[
        str | None, typer.Option(help="By which this worker is known when it comes back.", show_default="a new one")
    ] = None,
    give_up: Annotated[float, typer.Option(min=0.0, help="Seconds to try to reach a server that is gone.")] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print losses and more as JSON at the end.")] = False,
) -> None:
    """Train as one worker of a gradient server (parallel3d serve-gradients), which hands out shares of each batch.

    Exit codes: 0 well, 3 bad configuration, 4 the server is gone or refuses, or training failed, 130 interrupted.
    """
    open_standard_fds()
    overrides = parse_settings(settings or [])
    split_address(address)
    config = load_config(file, overrides=overrides)
    token, tls = _token(token_file), _trusting(tls_ca)
    find = partial(locate, file, overrides)

    def make_worker() -> GradientWorker:
        from parallel3d.gradient_worker.worker import GradientWorker

        return GradientWorker(address, token=token, tls=tls, node_id=node_id, give_up_seconds=give_up)

    raise typer.Exit(_train(config, make_worker, find, as_json))


def _token(path: Path | None) -> bytes | None:
    from runtime.gradient_server.wire.auth import read_token

    return None if path is None else read_token(str(path))


def _trusting(path: Path | None) -> ssl.SSLContext | None:
    import ssl

    if path is None:
        return None
    try:
        return ssl.create_default_context(cafile=path)
    except OSError as error:
        raise ConfigError(f"--tls-ca {path}: no certificate can be read: {error.strerror or error}.") from None


def _train(config: RunConfig, make_worker: MakeWorker, find: Locate, as_json: bool) -> int:
    from parallel3d.cli.joined_run import JoinedRun
    from parallel3d.gradient_worker.joined_training import check_joinable
    from parallel3d.planning.preflight import check_before_start, placing
    from runtime.loop import run_on_uvloop

    with redirect_stdout(sys.stderr), placing(find):  # what a factory of the user's prints is not our data
        check_joinable(config)
        joined = JoinedRun(config, check_before_start(config, find), make_worker())
        run_on_uvloop(joined.work())
    _say_the_end(joined, as_json)
    return joined.exit_code


def _say_the_end(joined: JoinedRun, as_json: bool) -> None:
    from parallel3d.json_lines import dump

    print(joined.summary(), file=sys.stderr if as_json else sys.stdout)
    if as_json:
        print(dump(joined.to_json()))
