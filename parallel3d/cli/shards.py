"""`parallel3d shards`: which part of a run's model each stage and rank has."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from parallel3d.cli.validate import errors_as_json, parse_settings
from parallel3d.config import RunConfig, load_config, locate

if TYPE_CHECKING:
    from parallel3d.planning.blueprint import Blueprint
    from parallel3d.tensor.shards import Shard

_BYTES = {"float32": 4, "float64": 8, "bfloat16": 4}
"""Of a weight; with bfloat16, weights are still float32."""
_MIB = 1 << 20


def shards(
    file: Annotated[Path, typer.Argument(help="The run's YAML file.", show_default=False)],
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a key, such as parallel.tp=4. Repeatable."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the table, or the errors, as JSON.")] = False,
) -> None:
    """Show how a run's model is cut: each module with parameters, its stage, its tensor-parallel strategy, what the
    ranks exchange for it, and what a rank has of it; then the parameters of each stage and each rank.

    Nothing is started, and the model gets no memory. What does not fit exits with 3, as when the run starts.
    """
    from parallel3d.planning.preflight import draw_before_start

    overrides = parse_settings(settings or [])
    with errors_as_json(as_json):
        config = load_config(file, overrides=overrides)
        blueprint = draw_before_start(config, partial(locate, file, overrides))
    print(_as_json(config, blueprint) if as_json else _as_text(file, config, blueprint))


def _as_json(config: RunConfig, blueprint: Blueprint) -> str:
    from parallel3d.formatting import json_lines

    cut = blueprint.shards
    return json_lines(
        {
            "model": config.model.factory,
            "tp": config.parallel.tp,
            "pp": config.parallel.pp,
            "sequence_parallel": cut.sequence is not None,
            "layers_per_stage": list(blueprint.layers_per_stage),
            "parameters": _num_parameters(blueprint),
            "modules": [_module(each) for each in cut],
            "stages": [
                {"stage": stage, "pp": pp, "parameters": cut.num_parameters([stage])}
                for stage, pp in enumerate(blueprint.table.rank_of_stage)
            ],
            "ranks": _ranks(blueprint),
        }
    )


def _module(shard: Shard) -> dict[str, Any]:
    return {
        "path": shard.path,
        "kind": shard.kind,
        "stage": shard.stage,
        "strategy": shard.strategy,
        "pattern": shard.pattern,
        "whole_shape": list(shard.whole_shape),
        "local_shape": list(shard.local_shape),
        "parameters": shard.num_parameters,
    }


def _num_parameters(blueprint: Blueprint) -> int:
    """Of the whole model."""
    return sum(parameter.numel() for parameter in blueprint.model.whole.parameters())


def _ranks(blueprint: Blueprint) -> list[dict[str, Any]]:
    """The ranks of one replica."""
    found = []
    for pp in range(blueprint.table.num_ranks):
        stages = blueprint.table.stages_of_rank(pp)
        for tp in range(blueprint.shards.tp):
            number = blueprint.shards.num_parameters(stages, tp)
            found.append({"tp": tp, "pp": pp, "stages": list(stages), "parameters": number})
    return found


def _as_text(file: Path, config: RunConfig, blueprint: Blueprint) -> str:
    mesh, cut = config.parallel, blueprint.shards
    title = f"{file}: {config.model.factory}, {_num_parameters(blueprint):,} parameters, tp {mesh.tp} x pp {mesh.pp}"
    if cut.sequence is not None:
        title += f", sequence cut from {cut.sequence[0]} to {cut.sequence[1]}"
    head = ("module", "kind", "stage", "strategy", "pattern", "local shape", "of", "parameters")
    modules = [_row(each) for each in cut]
    stages = [
        (f"stage {stage}", f"pp={pp}", f"{cut.num_parameters([stage]):,}")
        for stage, pp in enumerate(blueprint.table.rank_of_stage)
    ]
    each = _BYTES[config.train.precision]
    ranks = [
        (
            f"rank tp={rank['tp']} pp={rank['pp']}",
            "stages " + " ".join(map(str, rank["stages"])),
            f"{rank['parameters']:,}",
            f"{rank['parameters'] * each / _MIB:,.1f} MiB",
        )
        for rank in _ranks(blueprint)
    ]
    parts = (
        [title],
        _table([head, *modules], right=(2, 7)),
        ["parameters of each stage, on its first tensor-parallel rank", *_table(stages, right=(2,))],
        ["parameters of each rank, and the memory of its weights", *_table(ranks, right=(2, 3))],
    )
    return "\n\n".join("\n".join(part) for part in parts)


def _row(shard: Shard) -> tuple[str, ...]:
    is_cut = shard.local_shape != shard.whole_shape
    return (
        shard.path or "(the model itself)",
        shard.kind,
        str(shard.stage),
        shard.strategy,
        shard.pattern or "-",
        _shape(shard.local_shape),
        _shape(shard.whole_shape) if is_cut else "",
        f"{shard.num_parameters:,}",
    )


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "1"


def _table(rows: Sequence[Sequence[str]], right: Sequence[int]) -> list[str]:
    """Aligned columns; those in `right` are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            text.rjust(width) if index in right else text.ljust(width)
            for index, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("shards")(shards)
