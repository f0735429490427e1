"""`parallel3d report`: a report on a run, from its folder: as text, as an HTML page, or as JSON. No torch."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from runtime.errors import InvalidCall

STDOUT = "-"


def report(
    run_dir: Annotated[Path, typer.Argument(help="The run's folder, such as runs/<run_id>.", show_default=False)],
    html: Annotated[
        str | None,
        typer.Option("--html", metavar="FILE", help="Write a page with the plots instead; - is stdout."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Report on a run: its efficiency by axis, where the time went, memory, bottlenecks with their remedies.

    Of a run that was killed, or is still running, the report has what its folder has.
    """
    if html is not None and as_json:
        raise typer.BadParameter("it is either a page or JSON.", param_hint="--html and --json")

    from parallel3d.reports.html import to_page
    from parallel3d.reports.run_reader import read_run
    from parallel3d.reports.text import report_text

    run = read_run(run_dir)
    if html == STDOUT:
        sys.stdout.write(to_page(run))
    elif html is not None:
        _write(Path(html), to_page(run))
    elif as_json:
        print(json.dumps(run.report().to_json(), indent=2))
    else:
        print(report_text(run.report()))


def _write(path: Path, page: str) -> None:
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise InvalidCall(f"--html {path} can't be written: {error.strerror}. Name another file.") from None


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("report")(report)
