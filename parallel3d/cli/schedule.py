"""`parallel3d schedule`: what a pipeline schedule looks like, and what it costs. No torch."""

from __future__ import annotations

import os
import shutil
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from parallel3d import exit_codes
from parallel3d.cli.costs import BackwardOption, CostOptions, ForwardOption, TransferOption, WeightBackwardOption
from runtime.errors import InvalidCall

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from parallel3d.pipeline.schedules.table import Table
    from parallel3d.pipeline.simulation.comparison import Entry
    from parallel3d.pipeline.simulation.outcome import Simulation
    from parallel3d.reports.drawing import Lane

WIDTH_OF_NO_TERMINAL = 100
_OPTIONS = {"ranks": "--pp", "microbatches": "--microbatches", "stages": "--virtual-stages"}
_MAX_CELLS = 1_000_000  # stages x microbatches: more would take all memory, and nobody reads it
_COLUMNS = ("schedule", "virtual stages", "makespan", "x 1f1b", "bubble", "peak activations")


class Actions(StrEnum):
    """Which are shown."""

    COMPUTE = "compute"
    ALL = "all"


def schedule(
    schedule: Annotated[
        str | None,
        typer.Option(
            help="gpipe, 1f1b, interleaved, round-robin, zero-bubble, zbv, dualpipe-v, or csv:PATH.",
            show_default="1f1b",
        ),
    ] = None,
    pp: Annotated[int | None, typer.Option(help="Pipeline ranks.", show_default="the file's for csv:")] = None,
    microbatches: Annotated[int | None, typer.Option(help="Of a step.", show_default="the file's for csv:")] = None,
    virtual_stages: Annotated[
        int | None, typer.Option(help="Stages a rank.", show_default="1; 2 for zbv and dualpipe-v")
    ] = None,
    forward: ForwardOption = "1",
    backward: BackwardOption = "2",
    weight_backward: WeightBackwardOption = None,
    transfer: TransferOption = "0",
    actions: Annotated[
        Actions, typer.Option(help="all: also sends, receives and reductions, listed rank by rank.")
    ] = Actions.COMPUTE,
    compare: Annotated[bool, typer.Option("--compare", help="All schedules of this size in one table.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as one JSON object.")] = False,
    svg: Annotated[Path | None, typer.Option(help="Also draw it to this file, time to scale.")] = None,
    png: Annotated[Path | None, typer.Option(help="The same as a PNG picture; needs matplotlib.")] = None,
    html: Annotated[Path | None, typer.Option(help="The same as a page, with tables and the critical path.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Also write the table, to be changed and run as csv:PATH.")] = None,
    measured: Annotated[
        Path | None, typer.Option(help="A run's folder, or a measured step: planned beside it, in milliseconds.")
    ] = None,
) -> None:
    """Draw a pipeline schedule: a row a rank, time to the right, then its makespan, its bubble and what it keeps.

    2F0 is stage 2, forward, microbatch 0; B is a backward, I and W are its input part and its weight part.

    Times are in any unit.
    """
    from parallel3d.pipeline.simulation import simulate

    costs = CostOptions(forward, backward, weight_backward, transfer)
    files = {"--svg": svg, "--png": png, "--html": html}
    sizes = {"--pp": pp, "--microbatches": microbatches, "--virtual-stages": virtual_stages}
    others = {"--schedule": schedule, "--actions all": actions is Actions.ALL or None, "--csv": csv}
    try:
        if measured is not None:
            excluded = {"--schedule": schedule, **sizes, "--compare": compare or None, **others}
            _refuse("--measured has a schedule of its own.", "--measured", excluded)
            if changed := costs.changed():
                raise InvalidCall(f"--measured has times of its own. Leave out {changed} or --measured.")
            _show_measured(measured, files, as_json)
            return
        if compare:
            _refuse("--compare shows all schedules as a table.", "--compare", {**others, **files})
            _show_comparison(pp, microbatches, virtual_stages, costs, as_json)
            return
        _check_files({**files, "--csv": csv})
        table = table_of(schedule or "1f1b", pp, microbatches, virtual_stages)
        result = simulate(table, costs.of_stages(table.stages))
    except InvalidCall as error:
        print(f"parallel3d schedule: {error}", file=sys.stderr)
        raise typer.Exit(exit_codes.USAGE) from None
    _write_pictures(result, files)
    shown = table.with_communication() if actions is Actions.ALL else table
    if csv is not None:
        _write_table(shown, csv)
    if as_json:
        _show_json(shown, result)
    else:
        _show_text(shown, result, listed=actions is Actions.ALL)


def _refuse(reason: str, option: str, excluded: Mapping[str, object]) -> None:
    """Raises InvalidCall for the first of the options that `option` excludes."""
    for name, value in excluded.items():
        if value is not None:
            raise InvalidCall(f"{reason} Leave out {name} or {option}.")


def table_of(schedule: str, pp: int | None, microbatches: int | None, virtual_stages: int | None) -> Table:
    """The table that these options describe. Raises InvalidCall, which names the option at fault."""
    from parallel3d.pipeline.schedules.build import OtherSize, build
    from parallel3d.pipeline.schedules.limits import is_csv

    if not is_csv(schedule):
        pp, microbatches = _given(pp, microbatches)
        check_size(pp, virtual_stages, microbatches)
    try:
        return build(schedule, pp, microbatches, virtual_stages)
    except OtherSize as error:
        option = _OPTIONS[error.size]
        raise InvalidCall(f"{error.problem} Leave out {option}: the file says how many.") from error


def check_size(pp: int, virtual_stages: int | None, microbatches: int) -> None:
    cells = pp * (virtual_stages or 1) * microbatches
    if cells > _MAX_CELLS:
        raise InvalidCall(f"{cells} = stages x microbatches, which is more than {_MAX_CELLS}. Use fewer.")


def _given(pp: int | None, microbatches: int | None) -> tuple[int, int]:
    if pp is None:
        raise InvalidCall("the number of pipeline ranks is missing. Give it, such as --pp 4.")
    if microbatches is None:
        raise InvalidCall("the number of microbatches is missing. Give it, such as --microbatches 8.")
    return pp, microbatches


def _check_files(files: Mapping[str, Path | None]) -> None:
    """Raises InvalidCall for a file that can't be written in the end; leaves nothing there."""
    for option, path in files.items():
        if path is not None:
            _check_file(option, path)


def _check_file(option: str, path: Path) -> None:
    if option == "--png":
        from parallel3d.reports.drawing.png import can_draw_png

        if not can_draw_png():
            raise InvalidCall(
                "--png needs matplotlib, which is not installed. pip install 'parallel3d[plot]', or use --svg."
            )
    was_there = path.exists()
    try:
        path.open("ab").close()
    except OSError as error:
        raise InvalidCall(f"{option} {path} can't be written: {error.strerror}. Name another file.") from None
    if not was_there:
        path.unlink()


def _show_measured(path: Path, files: dict[str, Path | None], as_json: bool) -> None:
    from parallel3d.formatting import json_lines
    from parallel3d.pipeline.simulation.measured import compare
    from parallel3d.reports.drawing.lanes import lanes_of_measured
    from parallel3d.reports.run_reader import load_measured_step

    _check_files(files)
    step = load_measured_step(path)
    drawn = step.in_milliseconds()
    _write_pictures(compare(drawn).planned, files, lanes_of_measured(drawn))
    compared = compare(step)
    print(json_lines(compared.to_json()) if as_json else compared)


def _write_pictures(result: Simulation, files: dict[str, Path | None], measured: Sequence[Lane] | None = None) -> None:
    if not any(files.values()):
        return
    from parallel3d.reports.drawing import draw, lanes_of
    from parallel3d.reports.drawing.page import to_page
    from parallel3d.reports.drawing.png import write_png
    from parallel3d.reports.drawing.svg import to_svg
    from parallel3d.reports.drawing.words import facts, title

    picture = draw(lanes_of(result), measured, title=title(result.table), subtitle=facts(result))
    for option, path in files.items():
        if path is None:
            continue
        try:
            if option == "--png":
                write_png(picture, path)
            else:
                text = to_svg(picture) if option == "--svg" else to_page(result, measured)
                path.write_text(text, encoding="utf-8")
        except OSError as error:
            print(f"parallel3d schedule: {option} {path}: {error.strerror}", file=sys.stderr)
            raise typer.Exit(exit_codes.ERROR) from None


def _write_table(table: Table, path: Path) -> None:
    from parallel3d.pipeline.schedules.csv_table import write_csv

    try:
        write_csv(table, path)
    except OSError as error:
        print(f"parallel3d schedule: --csv {path}: {error.strerror}", file=sys.stderr)
        raise typer.Exit(exit_codes.ERROR) from None


def _show_json(shown: Table, result: Simulation) -> None:
    from parallel3d.formatting import json_lines

    document = {
        "schedule": shown.schedule,
        "stages": shown.stages,
        "microbatches": shown.microbatches,
        "ranks": [list(map(str, column)) for column in shown.columns],
        "bubble_ratio": result.bubble_ratio,
        "peak_activations": list(result.peak_activations),
    }
    print(json_lines(document))


def _show_text(shown: Table, result: Simulation, listed: bool) -> None:
    from parallel3d.reports.drawing.grid import columns, grid, painter, wants_colour
    from parallel3d.reports.drawing.lanes import lanes_of
    from parallel3d.reports.drawing.words import summary, title

    width = shutil.get_terminal_size((WIDTH_OF_NO_TERMINAL, 24)).columns
    paint = painter(os.environ) if wants_colour(sys.stdout, os.environ) else None
    lines = columns(shown.columns, width) if listed else grid(lanes_of(result), width, paint)
    print("\n".join((title(shown), "", *lines, "", summary(result))))


def _show_comparison(
    pp: int | None, microbatches: int | None, virtual_stages: int | None, costs: CostOptions, as_json: bool
) -> None:
    from parallel3d.pipeline.simulation.comparison import compare

    ranks, count = _given(pp, microbatches)
    check_size(ranks, max(virtual_stages or 0, 2), count)
    entries = compare(ranks, count, virtual_stages, costs.of_a_rank())
    show = _comparison_json if as_json else _comparison_text
    print(show(ranks, count, entries))


def _comparison_text(ranks: int, microbatches: int, entries: Sequence[Entry]) -> str:
    """One line per schedule."""
    from parallel3d.reports.drawing.words import count

    rows = [_COLUMNS, *(_entry_row(entry) for entry in entries)]
    widths = [max(len(row[place]) for row in rows if place < len(row)) for place in range(len(_COLUMNS))]
    widths[2:] = [
        max(len(row[place]) for row in rows if len(row) == len(_COLUMNS)) for place in range(2, len(_COLUMNS))
    ]
    lines = [
        f"{count(ranks, 'rank')}, {count(microbatches, 'microbatch')}, the same work for a rank in each schedule",
        "",
    ]
    for name, stages, *rest in rows:
        cells = [f"{name:<{widths[0]}}", f"{stages:>{widths[1]}}"]
        if len(rest) > 1:
            cells += (f"{text:>{width}}" for text, width in zip(rest, widths[2:], strict=True))
        else:
            cells += rest
        lines.append("  ".join(cells))
    return "\n".join((*lines, "", "peak activations: of the rank that keeps the most, in microbatches of a whole rank"))


def _entry_row(entry: Entry) -> tuple[str, ...]:
    from parallel3d.pipeline.simulation.comparison import Outcome
    from parallel3d.reports.drawing.words import number, percent

    result = entry.result
    start = (entry.schedule, str(entry.virtual_stages))
    if not isinstance(result, Outcome):
        return (*start, f"not possible: {result.reason}")
    return (
        *start,
        number(result.makespan),
        f"{result.relative_makespan:.3f}",
        percent(result.bubble_ratio),
        number(result.peak_activations),
    )


def _comparison_json(ranks: int, microbatches: int, entries: Sequence[Entry]) -> str:
    """An entry has figures, or `not_possible` with the nearest possible sizes."""
    from parallel3d.formatting import json_lines

    schedules = [_entry_values(entry, ranks) for entry in entries]
    return json_lines({"pp": ranks, "microbatches": microbatches, "schedules": schedules})


def _entry_values(entry: Entry, ranks: int) -> dict[str, Any]:
    from parallel3d.pipeline.simulation.comparison import Outcome

    start = {"schedule": entry.schedule, "virtual_stages": entry.virtual_stages}
    if isinstance(entry.result, Outcome):
        return {**start, **entry.result._asdict()}
    reason, microbatches, virtual_stages = entry.result
    nearest = {"pp": ranks, "microbatches": microbatches, "virtual_stages": virtual_stages}
    return {**start, "not_possible": reason, "nearest": nearest}


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("schedule")(schedule)
