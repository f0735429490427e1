"""`parallel3d verify`: compares a parallel run's metrics.json with that of one rank. No torch."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from parallel3d import exit_codes
from runtime.errors import InvalidCall

if TYPE_CHECKING:
    from collections.abc import Sequence

    from monitoring.verify import Judgement, Metrics

_METRICS = "metrics.json"


def verify(
    baseline: Annotated[Path, typer.Option(metavar="FILE", help="metrics.json of the run on one rank, or its folder.")],
    candidate: Annotated[Path, typer.Option(metavar="FILE", help="metrics.json of the run to judge, or its folder.")],
    world_size: Annotated[int, typer.Option(metavar="N", help="Ranks of the candidate.")],
    scaling_floor: Annotated[
        float, typer.Option(metavar="RATIO", help="Least scaling efficiency T_N / (N T_1), above 0 and at most 1.")
    ] = 0.85,
    loss_tolerance: Annotated[
        float, typer.Option(metavar="RATIO", help="Largest relative difference of the final losses, 0 to 1.")
    ] = 0.01,
    peak_gbps: Annotated[
        float | None,
        typer.Option(metavar="G", help="Peak bandwidth in GB/s: each all-reduce has to reach half of it."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the outcomes as JSON.")] = False,
) -> None:
    """Judge a parallel run beside the same run on one rank, by three gates, and show what each says.

    scaling_efficiency: tokens/s on N ranks over N times those on one. loss: the final losses' relative difference.
    allreduce_bandwidth: each step's all-reduce really moved bytes.

    Exit codes: 0 all accept, 5 one rejects, 2 a threshold is outside its range, 1 a file can't be read.
    """
    from monitoring.verify import Thresholds, notes
    from monitoring.verify import verify as judge

    try:
        thresholds = Thresholds(scaling_floor, loss_tolerance, peak_gbps)
    except ValueError as error:
        print(f"parallel3d verify: {error}", file=sys.stderr)
        raise typer.Exit(exit_codes.USAGE) from None
    one, many = read_metrics(baseline), read_metrics(candidate)
    judgements, doubts = judge(one, many, world_size, thresholds), notes(one, many, world_size)
    for doubt in doubts:
        print(f"parallel3d verify: {doubt}", file=sys.stderr)
    accepted = all(judgement.accepts for judgement in judgements)
    if as_json:
        document = {
            "accepted": accepted,
            "baseline": one.file,
            "candidate": many.file,
            "world_size": world_size,
            "scaling_floor": scaling_floor,
            "loss_tolerance": loss_tolerance,
            "peak_gbps": peak_gbps,
            "gates": [judgement.to_json() for judgement in judgements],
            "notes": doubts,
        }
        print(json.dumps(document, indent=2))
    else:
        print(as_text(judgements))
    raise typer.Exit(exit_codes.OK if accepted else exit_codes.REJECTED)


def read_metrics(path: Path) -> Metrics:
    """Read the file. Raises InvalidCall, which says what is wrong with it."""
    from monitoring.verify import Metrics

    file = path / _METRICS if path.is_dir() else path
    try:
        content: Any = json.loads(file.read_bytes())
    except OSError as error:
        raise InvalidCall(f"{file} can't be read: {error.strerror}. Give the metrics.json of a finished run.") from None
    except (ValueError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise InvalidCall(f"{file} is not JSON: {why}. Give the metrics.json of a finished run.") from None
    if not isinstance(content, dict):
        raise InvalidCall(f"{file} holds no JSON object. Give the metrics.json of a finished run.")
    return Metrics(str(file), content)


def as_text(judgements: Sequence[Judgement]) -> str:
    """One line per gate, and the result of all."""
    gates, outcomes = (
        max(len(text) for text in texts)
        for texts in ([each.gate for each in judgements], [each.outcome for each in judgements])
    )
    lines = [f"{each.gate:<{gates}}  {each.outcome:<{outcomes}}  {each.message}" for each in judgements]
    rejecting = [each.gate for each in judgements if not each.accepts]
    lines.append(f"rejected by {', '.join(rejecting)}" if rejecting else "accepted")
    return "\n".join(lines)


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("verify")(verify)
