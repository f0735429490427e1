"""`parallel3d simulate`: checks a run's pipeline for deadlock and simulates its times. No torch."""

from __future__ import annotations

import json
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from parallel3d import exit_codes
from parallel3d.cli.costs import BackwardOption, CostOptions, ForwardOption, TransferOption, WeightBackwardOption
from parallel3d.cli.schedule import check_size
from parallel3d.cli.validate import errors_as_json, parse_settings
from parallel3d.config import RunConfig, load_config, locate
from parallel3d.config.errors import Problem, problem_of_key, show
from parallel3d.planning.preflight import Locate, placing
from runtime.errors import InvalidCall

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from parallel3d.pipeline.schedules.table import Table
    from parallel3d.pipeline.simulation.deadlock import Deadlock
    from parallel3d.pipeline.simulation.outcome import Simulation

_SCHEDULE = "pipeline.schedule"


def simulate(
    file: Annotated[Path, typer.Argument(help="The run's YAML file.", show_default=False)],
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a key, such as parallel.pp=4. Repeatable."),
    ] = None,
    forward: ForwardOption = "1",
    backward: BackwardOption = "2",
    weight_backward: WeightBackwardOption = None,
    transfer: TransferOption = "0",
    as_json: Annotated[bool, typer.Option("--json", help="Print the result, or the errors, as JSON.")] = False,
) -> None:
    """Simulate a run's pipeline: no deadlock, how long a step takes, its bubble, what it keeps, its critical path.

    Times are in any unit. A table that would wait for ever is drawn, and the exit code is 3.
    """
    from parallel3d.pipeline.simulation import find_deadlock
    from parallel3d.pipeline.simulation import simulate as run

    overrides = parse_settings(settings or [])
    find = partial(locate, file, overrides)
    with errors_as_json(as_json):
        config = load_config(file, overrides=overrides)
        with placing(find):
            table = _table(config, partial(_is_in, file, find))
    # The plain table first: its drawing has only what the user wrote.
    deadlock = find_deadlock(table) or find_deadlock(table.with_communication())
    if deadlock is not None:
        _refuse(find, config, deadlock, as_json)
    try:
        costs = CostOptions(forward, backward, weight_backward, transfer).of_stages(table.stages)
    except InvalidCall as error:
        print(f"parallel3d simulate: {error}", file=sys.stderr)
        raise typer.Exit(exit_codes.USAGE) from None
    result = run(table, costs)
    print(_as_json(result) if as_json else _as_text(file, result))


def _table(config: RunConfig, is_in_file: Callable[[str], bool]) -> Table:
    from parallel3d.pipeline.schedules.limits import is_csv
    from parallel3d.planning.blueprint import configured_table

    pipeline, pp = config.pipeline, config.parallel.pp
    sizes = {"pipeline.microbatches": pipeline.microbatches, "parallel.pp": pp}
    try:
        check_size(pp, None if is_csv(pipeline.schedule) else pipeline.virtual_stages, pipeline.microbatches)
    except InvalidCall as error:
        key = min(sizes, key=is_in_file)  # an override rather than the file
        raise problem_of_key(key, sizes[key], str(error)) from error
    try:
        return configured_table(config)
    except InvalidCall as error:
        raise problem_of_key(_SCHEDULE, pipeline.schedule, str(error)) from error


def _is_in(file: Path, find: Locate, key: str) -> bool:
    """Whether the value is not from an override or the environment."""
    return find(key).source == str(file)


def _refuse(find: Locate, config: RunConfig, deadlock: Deadlock, as_json: bool) -> NoReturn:
    problem = Problem(find(_SCHEDULE), _SCHEDULE, show(config.pipeline.schedule), str(deadlock), "")
    if as_json:
        print(json.dumps({"errors": [{**problem.to_json(), "deadlock": _cycle(deadlock)}]}, indent=2))
    else:
        print(problem, file=sys.stderr)
    raise typer.Exit(exit_codes.BAD_CONFIG)


def _cycle(deadlock: Deadlock) -> list[dict[str, Any]]:
    return [
        {"rank": at.rank, "action": str(at.action), "waits_for": str(needs.action), "of_rank": needs.rank}
        for at, needs in deadlock.cycle
    ]


def _as_json(result: Simulation) -> str:
    from parallel3d.formatting import json_lines

    table = result.table
    return json_lines(
        {
            "schedule": table.schedule,
            "stages": table.stages,
            "microbatches": table.microbatches,
            "makespan": result.makespan,
            "bubble_ratio": result.bubble_ratio,
            "rank_bubble_ratios": list(result.rank_bubble_ratios),
            "stage_bubble_ratios": list(result.stage_bubble_ratios),
            "peak_activations": list(result.peak_activations),
            "critical_path": [{**step._asdict(), "action": str(step.action)} for step in result.critical_path],
        }
    )


def _as_text(file: Path, result: Simulation) -> str:
    from parallel3d.pipeline.schedules.actions import Kind
    from parallel3d.pipeline.simulation.outcome import Reason
    from parallel3d.reports.drawing.words import count, number, percent, title

    steps = result.critical_path
    kinds = Counter(step.action.kind for step in steps)
    busy = ", ".join(f"{kinds[kind]} {kind}" for kind in Kind if kind in kinds)
    moves = sum(step.reason is Reason.DATA for step in steps)
    takes, travel = "takes" if moves == 1 else "take", sum(step.transfer for step in steps)
    bubbles = [f"{percent(result.bubble_ratio)}; by rank: {_percents(result.rank_bubble_ratios)}"]
    if result.table.stages > result.table.num_ranks:
        bubbles.append(f"by stage: {_percents(result.stage_bubble_ratios)}")
    peaks = " ".join(map(str, result.peak_activations))
    return "\n".join(
        (
            f"{file}: {title(result.table)}: no deadlock",
            f"makespan          {number(result.makespan)}",
            f"bubble            {'; '.join(bubbles)}",
            f"peak activations  by stage: {peaks}",
            f"critical path     {busy}; {count(moves, 'change')} of rank, which {takes} {number(travel)}",
        )
    )


def _percents(ratios: Sequence[float]) -> str:
    return " ".join(f"{100 * ratio:.1f}" for ratio in ratios)


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("simulate")(simulate)
