"""`parallel3d dashboards`: writes Grafana's dashboards, Prometheus' rules, and what starts both beside a run."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from runtime.errors import Parallel3DError

if TYPE_CHECKING:
    from monitoring.dashboards import Target
    from parallel3d.config import RunConfig

_MESH = "Mesh"
_PROMETHEUS = "Prometheus and Grafana"


def dashboards(
    out: Annotated[Path, typer.Option(help="The folder to write.", show_default=False)],
    file: Annotated[
        Path | None, typer.Argument(help="The run's YAML file: its mesh and endpoint.", show_default=False)
    ] = None,
    dp: Annotated[int | None, typer.Option(min=1, rich_help_panel=_MESH, help="Replicas.", show_default=False)] = None,
    tp: Annotated[
        int | None, typer.Option(min=1, rich_help_panel=_MESH, help="Tensor-parallel ranks.", show_default=False)
    ] = None,
    pp: Annotated[
        int | None, typer.Option(min=1, rich_help_panel=_MESH, help="Pipeline ranks.", show_default=False)
    ] = None,
    datasource: Annotated[
        str, typer.Option(metavar="NAME", rich_help_panel=_PROMETHEUS, help="Prometheus' name in Grafana.")
    ] = "Prometheus",
    prometheus: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            rich_help_panel=_PROMETHEUS,
            help="What Prometheus shall scrape; a URL for https. Else as the file says, or port 9847 of this host.",
            show_default=False,
        ),
    ] = None,
    token_file: Annotated[
        str | None,
        typer.Option(
            metavar="PATH", rich_help_panel=_PROMETHEUS, help="The run's token, for Prometheus.", show_default=False
        ),
    ] = None,
    ca_file: Annotated[
        str | None,
        typer.Option(
            metavar="PATH", rich_help_panel=_PROMETHEUS, help="The root of its certificate.", show_default=False
        ),
    ] = None,
    interval: Annotated[
        int, typer.Option(min=1, max=60, rich_help_panel=_PROMETHEUS, help="Seconds between two scrapes.")
    ] = 5,
    runbooks: Annotated[
        str, typer.Option(metavar="URL", rich_help_panel=_PROMETHEUS, help="Where alerts say that help is.")
    ] = "docs/runbooks",
) -> None:
    """Write dashboards, recording and alert rules for a mesh, and a compose file that starts run, Prometheus and
    Grafana. The same bytes each time; files that something else has written are left alone.
    """
    from monitoring.dashboards import Setup, files_for, write_files

    given = {axis: size for axis, size in (("dp", dp), ("tp", tp), ("pp", pp)) if size is not None}
    settings = tuple(f"parallel.{axis}={size}" for axis, size in given.items())
    config = _load(file, settings)
    shape = given if config is None else {axis: getattr(config.parallel, axis) for axis in ("dp", "tp", "pp")}
    setup = Setup(
        **shape,
        datasource=datasource,
        target=_target(prometheus, config, token_file, ca_file),
        per_rank=config is not None and config.monitoring.per_rank,
        interval=interval,
        runbooks=runbooks,
        settings=settings,
    )
    try:
        run_yaml = None if file is None else file.read_text()
        for path in write_files(out, files_for(setup, run_yaml)):
            print(path)
    except OSError as error:
        raise Parallel3DError(f"dashboards can't be written: {error}") from error
    print(f"Let Prometheus scrape {setup.target.url}/metrics: the run needs {_wanted(setup.target)}.", file=sys.stderr)


def _load(file: Path | None, settings: tuple[str, ...]) -> RunConfig | None:
    from parallel3d.cli.validate import parse_settings
    from parallel3d.config import load_config

    return None if file is None else load_config(file, overrides=parse_settings(list(settings)))


def _target(asked: str | None, config: RunConfig | None, token_file: str | None, ca_file: str | None) -> Target:
    from monitoring.dashboards import Target

    if asked is None:
        return _as_configured(config, token_file, ca_file)
    try:
        return Target.parse(asked, token_file=token_file, ca_file=ca_file)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--prometheus") from None


def _as_configured(config: RunConfig | None, token_file: str | None, ca_file: str | None) -> Target:
    """As the configuration says; an endpoint on all interfaces is scraped on this host."""
    from monitoring.dashboards import Target
    from monitoring.dashboards.target import DEFAULT_PORT

    if config is None:
        return Target(token_file=token_file, ca_file=ca_file)
    keys = config.monitoring
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(keys.host, keys.host)
    tls = keys.tls_certificate is not None
    if token_file is None and keys.token_file is not None:
        token_file = os.path.abspath(keys.token_file)  # Prometheus would look beside its own configuration
    return Target(host, keys.port or DEFAULT_PORT, tls, token_file, ca_file)


def _wanted(target: Target) -> str:
    return f"monitoring.port={target.port}" + ("" if target.is_local else f", and monitoring.host={target.host}")


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("dashboards")(dashboards)
