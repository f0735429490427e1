"""Rules that span several keys: mesh, pipeline, batch and monitoring here, and `RULES`, which is all of them."""

from __future__ import annotations

import math
from collections.abc import Iterator

from monitoring.http.addresses import is_loopback
from parallel3d.config.errors import enumerate_words
from parallel3d.config.findings import Finding, Rule, near_multiples
from parallel3d.config.model_rules import MODEL_RULES, does_not_divide
from parallel3d.config.sections import GptModel, LlamaModel, RunConfig
from parallel3d.pipeline.schedules.layer_split import example_cut
from parallel3d.pipeline.schedules.limits import (
    IMPLIES_TWO_VIRTUAL_STAGES,
    NEEDS_VIRTUAL_STAGES,
    NEEDS_WHOLE_ROUNDS,
    better_microbatches,
    has_one_stage_a_rank,
)


def _fits_world(config: RunConfig, world_size: int | None) -> Iterator[Finding]:
    mesh, product = config.parallel, config.world_size
    if world_size is None or product == world_size:
        return
    sizes = {"dp": mesh.dp, "tp": mesh.tp, "pp": mesh.pp}
    fixes = {axis: world_size * size // product for axis, size in sizes.items() if world_size % (product // size) == 0}
    if "pp" in fixes and not _splits(config, fixes["pp"]):
        del fixes["pp"]
    if "tp" in fixes and does_not_divide(config, fixes["tp"]):
        del fixes["tp"]
    remedy, blame = _other_mesh(sizes, world_size), tuple(sizes)
    if fixes:
        axis = max(fixes, key=lambda axis: sizes[axis] > 1)
        remedy, blame = f"Set {axis} to {fixes[axis]}", (axis, *sizes)
    text = " x ".join(f"{axis}({size})" for axis, size in sizes.items())
    yield Finding(
        tuple(f"parallel.{axis}" for axis in blame),
        f"{text} = {_ranks(product)}, but {world_size} {'was' if world_size == 1 else 'were'} started.",
        f"{remedy}, or start {_ranks(product)}.",
    )


def _splits(config: RunConfig, pp: int) -> bool:
    """Whether the model can be split over that many pipeline ranks."""
    layers, how = _num_layers(config), config.pipeline.layers_per_stage
    if layers is None or isinstance(how, tuple):
        return True
    stages = pp * config.pipeline.virtual_stages
    # An uneven split is valid, but a remedy proposes only even ones unless the user asked for another method.
    return layers >= stages if how in ("parameters", "profile") else layers % stages == 0


def _num_layers(config: RunConfig) -> int | None:
    """Layers that are split into stages; None if only the user's factory knows. A built-in model's first and last one
    also hold the embedding and the head."""
    return config.model.args.layers if isinstance(config.model, GptModel | LlamaModel) else None


def _other_mesh(sizes: dict[str, int], world_size: int) -> str:
    """The remedy if no single axis can be changed: keep as much of tp and pp as possible."""
    tp = math.gcd(sizes["tp"], world_size)
    pp = math.gcd(sizes["pp"], world_size // tp)
    return f"Set dp to {world_size // tp // pp}, tp to {tp} and pp to {pp}"


def _ranks(count: int) -> str:
    return f"{count} rank" if count == 1 else f"{count} ranks"


def _virtual_stages_fit_schedule(config: RunConfig, _: int | None) -> Iterator[Finding]:
    schedule, virtual = config.pipeline.schedule, config.pipeline.virtual_stages
    blame = ("pipeline.virtual_stages", "pipeline.schedule")
    if schedule in NEEDS_VIRTUAL_STAGES and virtual < 2:
        yield Finding(
            blame,
            f"the schedule {schedule} needs 2 or more virtual stages a rank.",
            "Set virtual_stages to 2.",
        )
    elif schedule in IMPLIES_TWO_VIRTUAL_STAGES and virtual != 2:
        yield Finding(
            blame,
            f"the schedule {schedule} always has 2 virtual stages a rank.",
            "Set virtual_stages to 2, or leave it out.",
        )
    elif virtual > 1 and has_one_stage_a_rank(schedule):
        yield Finding(
            blame,
            f"the schedule {schedule} has one stage a rank.",
            "Set virtual_stages to 1, or schedule to interleaved or round-robin.",
        )


def _microbatches_fit_schedule(config: RunConfig, _: int | None) -> Iterator[Finding]:
    schedule, pp = config.pipeline.schedule, config.parallel.pp
    better = [str(number) for number in better_microbatches(schedule, pp, config.pipeline.microbatches)]
    if not better:
        return
    blame = ("pipeline.microbatches", "pipeline.schedule", "parallel.pp")
    remedy = f"Set microbatches to {enumerate_words(better)}"
    if schedule in NEEDS_WHOLE_ROUNDS:
        yield Finding(blame, f"the schedule {schedule} needs a multiple of pp({pp}) microbatches.", f"{remedy}.")
    else:
        text = f"the schedule {schedule} needs 2 x pp({pp}) = {2 * pp} or more microbatches."
        yield Finding(blame, text, f"{remedy}, or schedule to zbv.")


def _layers_split(config: RunConfig, _: int | None) -> Iterator[Finding]:
    layers, given = _num_layers(config), config.pipeline.layers_per_stage
    if isinstance(given, tuple):
        yield from _layers_given(given, layers, config)
    elif layers is not None and layers < config.num_stages:
        most = layers // config.pipeline.virtual_stages
        lower = f"pp to {most}{' or less' if most > 1 else ''}, or " if most else ""
        yield Finding(
            ("parallel.pp", "pipeline.virtual_stages", "model.args.layers"),
            f"{layers} {'layer is' if layers == 1 else 'layers are'} too few for {_stages(config)}.",
            f"Set {lower}layers to {config.num_stages} or more.",
        )


def _layers_given(given: tuple[int, ...], layers: int | None, config: RunConfig) -> Iterator[Finding]:
    blame, stages = ("pipeline.layers_per_stage",), config.num_stages
    total = f" that add up to {layers}" if layers is not None else ""
    remedy = f"Give {stages} numbers{total}{example_cut(layers or stages, stages)}."
    if len(given) != stages:
        yield Finding(blame, f"layers of {len(given)} stages, but there are {_stages(config)}.", remedy)
    elif layers is not None and sum(given) != layers:
        yield Finding(blame, f"adds up to {sum(given)} layers, but the model has {layers}.", remedy)


def _stages(config: RunConfig) -> str:
    pp, virtual = config.parallel.pp, config.pipeline.virtual_stages
    return f"pp({pp}) x virtual_stages({virtual}) = {config.num_stages} stages"


def _batch_divides(config: RunConfig, _: int | None) -> Iterator[Finding]:
    dp, microbatches, batch = config.parallel.dp, config.pipeline.microbatches, config.batch_size
    if batch % (dp * microbatches):
        yield Finding(
            ("train.batch_size",),
            f"not a multiple of dp({dp}) x microbatches({microbatches}) = {dp * microbatches}.",
            f"Set batch_size to {near_multiples(batch, dp * microbatches)}.",
        )


def _order_is_a_bijection(config: RunConfig, _: int | None) -> Iterator[Finding]:
    table, mesh, blame = config.parallel.order, config.parallel, ("parallel.order",)
    if isinstance(table, str):
        return
    remedy = "Give each [dp, tp, pp] of the mesh to one rank, or set order to auto."
    if len(table) != config.world_size:
        yield Finding(blame, f"a table of {_ranks(len(table))}, but the mesh has {_ranks(config.world_size)}.", remedy)
        return
    owners: dict[tuple[int, int, int], int] = {}
    for rank, coords in enumerate(table):
        inside = all(0 <= c < size for c, size in zip(coords, (mesh.dp, mesh.tp, mesh.pp), strict=True))
        if not inside:
            text = f"rank {rank} is at {list(coords)}, outside the mesh of {mesh.dp} x {mesh.tp} x {mesh.pp}."
            yield Finding(blame, text, remedy)
            return
        if coords in owners:
            yield Finding(blame, f"ranks {owners[coords]} and {rank} are both at {list(coords)}.", remedy)
            return
        owners[coords] = rank


def _table_is_used(config: RunConfig, _: int | None) -> Iterator[Finding]:
    if config.comm.strategy_table is not None and config.comm.strategy != "adaptive":
        yield Finding(
            ("comm.strategy_table",),
            f"it is for adaptive all-reduces, and comm.strategy is {config.comm.strategy}.",
            "Set comm.strategy to adaptive, or remove strategy_table.",
        )


def _others_need_a_token(config: RunConfig, _: int | None) -> Iterator[Finding]:
    watched = config.monitoring
    if not watched.enabled or is_loopback(watched.host):
        return
    needed = {
        "token_file": watched.token_file,
        "tls_certificate": watched.tls_certificate,
        "tls_key": watched.tls_key,
    }
    missing = [f"monitoring.{key}" for key, value in needed.items() if value is None]
    if missing:
        yield Finding(
            ("monitoring.host",),
            "other hosts reach this address, so the run asks for a token and answers over TLS only.",
            f"Set {enumerate_words(missing, 'and')}, or host to 127.0.0.1.",
        )


def _certificate_has_a_key(config: RunConfig, _: int | None) -> Iterator[Finding]:
    pair = {"tls_certificate": config.monitoring.tls_certificate, "tls_key": config.monitoring.tls_key}
    given = [key for key, value in pair.items() if value is not None]
    if len(given) == 1 and is_loopback(config.monitoring.host):  # for other hosts `_others_need_a_token` reports it
        (missing,) = pair.keys() - set(given)
        yield Finding(
            (f"monitoring.{given[0]}",),
            f"TLS needs {missing} too.",
            f"Set monitoring.{missing}, or remove {given[0]}.",
        )


RULES = (
    Rule(_fits_world, ("parallel.dp", "parallel.tp", "parallel.pp")),
    Rule(_virtual_stages_fit_schedule, ("pipeline.schedule", "pipeline.virtual_stages")),
    Rule(_microbatches_fit_schedule, ("pipeline.schedule", "pipeline.microbatches", "parallel.pp")),
    Rule(
        _layers_split,
        (
            "model.factory",
            "model.args.layers",
            "parallel.pp",
            "pipeline.schedule",
            "pipeline.virtual_stages",
            "pipeline.layers_per_stage",
        ),
    ),
    Rule(_batch_divides, ("parallel.dp", "pipeline.microbatches", "train.batch_size")),
    Rule(_order_is_a_bijection, ("parallel.dp", "parallel.tp", "parallel.pp", "parallel.order")),
    Rule(_table_is_used, ("comm.strategy", "comm.strategy_table")),
    *MODEL_RULES,
    Rule(
        _others_need_a_token,
        (
            "monitoring.enabled",
            "monitoring.host",
            "monitoring.token_file",
            "monitoring.tls_certificate",
            "monitoring.tls_key",
        ),
    ),
    Rule(_certificate_has_a_key, ("monitoring.host", "monitoring.tls_certificate", "monitoring.tls_key")),
)
