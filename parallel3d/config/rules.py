"""Rules that span several keys. Each says which keys it reads, and finds numbers that would do."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from parallel3d.config.errors import enumerate_words
from parallel3d.config.factories import missing_module
from parallel3d.config.fields import is_factory
from parallel3d.config.models import GptModel, HfModel, LlamaModel, RunConfig
from parallel3d.cuts import example_cut
from parallel3d.schedules.limits import (
    IMPLIES_TWO_VIRTUAL_STAGES,
    NEEDS_VIRTUAL_STAGES,
    NEEDS_WHOLE_ROUNDS,
    better_microbatches,
    has_one_stage_a_rank,
)


@dataclass(frozen=True, slots=True)
class Finding:
    """A broken rule. `blame`: the keys at fault; the first that was given is shown, an override before the file."""

    blame: tuple[str, ...]
    message: str
    remedy: str


Check = Callable[[RunConfig, int | None], Iterator[Finding]]


@dataclass(frozen=True, slots=True)
class Rule:
    """A check, and the keys it reads: it says nothing while one of them is wrong by itself."""

    check: Check
    reads: tuple[str, ...]


def _fits_world(config: RunConfig, world_size: int | None) -> Iterator[Finding]:
    mesh, product = config.parallel, config.world_size
    if world_size is None or product == world_size:
        return
    sizes = {"dp": mesh.dp, "tp": mesh.tp, "pp": mesh.pp}
    fixes = {axis: world_size * size // product for axis, size in sizes.items() if world_size % (product // size) == 0}
    if "pp" in fixes and not _splits(config, fixes["pp"]):
        del fixes["pp"]
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
    """Whether the model could also be cut for that many pipeline ranks."""
    layers, how = _num_layers(config), config.pipeline.layers_per_stage
    if layers is None or isinstance(how, tuple):
        return True
    stages = pp * config.pipeline.virtual_stages
    # An uneven cut is accepted, but not proposed to someone who asked for an even one.
    return layers >= stages if how in ("parameters", "profile") else layers % stages == 0


def _num_layers(config: RunConfig) -> int | None:
    """The layers that are cut into stages; None where only the user's factory knows. The built-in GPT's first one has
    the embedding in it, and its last one the head."""
    return config.model.args.layers if isinstance(config.model, GptModel | LlamaModel) else None


def _other_mesh(sizes: dict[str, int], world_size: int) -> str:
    """Keeps what it can of tp and pp; dp takes the rest."""
    tp = math.gcd(sizes["tp"], world_size)
    pp = math.gcd(sizes["pp"], world_size // tp)
    return f"Set dp to {world_size // tp // pp}, tp to {tp} and pp to {pp}"


def _ranks(count: int) -> str:
    return f"{count} rank" if count == 1 else f"{count} ranks"


def _heads_divide_width(config: RunConfig, _: int | None) -> Iterator[Finding]:
    if not isinstance(config.model, GptModel | LlamaModel):
        return
    width, heads = config.model.args.width, config.model.args.heads
    if width % heads:
        yield Finding(
            ("model.args.heads", "model.args.width"),
            f"width({width}) is not a multiple of heads({heads}).",
            f"Set heads to {_near_divisors(width, heads)}, or width to {_near_multiples(width, heads)}.",
        )


def _kv_heads_divide_heads(config: RunConfig, _: int | None) -> Iterator[Finding]:
    if not isinstance(config.model, LlamaModel) or config.model.args.kv_heads is None:
        return
    heads, kv_heads = config.model.args.heads, config.model.args.kv_heads
    if heads % kv_heads:
        yield Finding(
            ("model.args.kv_heads", "model.args.heads"),
            f"heads({heads}) is not a multiple of kv_heads({kv_heads}).",
            f"Set kv_heads to {_near_divisors(heads, kv_heads)}.",
        )


def _tp_divides_heads(config: RunConfig, _: int | None) -> Iterator[Finding]:
    if not isinstance(config.model, GptModel | LlamaModel) or config.parallel.tensor_plan is not None:
        return
    args, tp = config.model.args, config.parallel.tp
    sizes = {"heads": args.heads}
    if isinstance(config.model, LlamaModel):
        sizes |= {"kv_heads": config.model.args.kv_heads or args.heads, "mlp_width": config.model.args.mlp_width or tp}
    for name, size in sizes.items():
        if size % tp:
            yield Finding(
                ("parallel.tp", f"model.args.{name}"),
                f"{name}({size}) is not a multiple of tp({tp}).",
                f"Set tp to {_near_divisors(size, tp)}, or {name} to {_near_multiples(size, tp)}.",
            )


def _sequence_is_cut(config: RunConfig, _: int | None) -> Iterator[Finding]:
    sequence, tp = config.sequence, config.parallel.tp
    if config.parallel.sequence_parallel and sequence % tp:
        yield Finding(
            ("parallel.sequence_parallel",),
            f"the sequence({sequence}) is not a multiple of tp({tp}).",
            f"Set the sequence to {_near_multiples(sequence, tp)}, or sequence_parallel to false.",
        )


def _sequence_fits_model(config: RunConfig, _: int | None) -> Iterator[Finding]:
    given, most = config.data.sequence, getattr(config.model.args, "sequence", None)
    if isinstance(config.model, GptModel) and given is not None and most is not None and given > most:
        yield Finding(
            ("data.sequence", "model.args.sequence"),
            f"the model has positions for model.args.sequence({most}) tokens.",
            f"Set it to {most} or less, or model.args.sequence to {given}.",
        )


def _tokens_have_a_file(config: RunConfig, _: int | None) -> Iterator[Finding]:
    data = config.data
    if data.source == "tokens" and data.path is None and data.factory is None:
        yield Finding(("data.path", "data.source"), "source tokens reads a file of tokens.", "Set path to that file.")


def _hf_model_is_given(config: RunConfig, _: int | None) -> Iterator[Finding]:
    if not isinstance(config.model, HfModel):
        return
    given = config.model.args
    blame = ("model.args.path", "model.args.config", "model.factory")
    if (given.path is None) == (given.config is None):
        yield Finding(
            blame,
            "hf needs either a folder or a configuration.",
            "Set model.args.path to a folder of save_pretrained, or model.args.config to {model_type: ...}.",
        )
    elif given.config is not None and not isinstance(given.config.get("model_type"), str):
        yield Finding(
            ("model.args.config",), "it does not say which model it is.", "Add model_type, for example llama."
        )


def _cosine_goes_down(config: RunConfig, _: int | None) -> Iterator[Finding]:
    optimizer = config.optimizer
    if optimizer.schedule == "cosine" and optimizer.min_lr > optimizer.lr:
        yield Finding(
            ("optimizer.min_lr", "optimizer.lr"),
            f"cosine goes down from lr({optimizer.lr:g}).",
            f"Set min_lr to {optimizer.lr:g} or less.",
        )


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
            f"Set batch_size to {_near_multiples(batch, dp * microbatches)}.",
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


def _factories_exist(key: str, value: Callable[[RunConfig], str | None]) -> Check:
    def check(config: RunConfig, _: int | None) -> Iterator[Finding]:
        name = value(config)
        missing = missing_module(name) if name is not None and is_factory(name) else None
        if missing is not None:
            yield Finding((key,), missing.message, missing.remedy)

    return check


def _one_source_of_data(config: RunConfig, _: int | None) -> Iterator[Finding]:
    if config.data.factory is not None and config.data.path is not None:
        yield Finding(("data.path",), "not read when data.factory is given.", "Remove data.path or data.factory.")


def _table_is_used(config: RunConfig, _: int | None) -> Iterator[Finding]:
    if config.comm.strategy_table is not None and config.comm.strategy != "adaptive":
        yield Finding(
            ("comm.strategy_table",),
            f"it is for adaptive all-reduces, and comm.strategy is {config.comm.strategy}.",
            "Set comm.strategy to adaptive, or remove strategy_table.",
        )


def _near_multiples(value: int, step: int) -> str:
    below, above = value // step * step, (value // step + 1) * step
    return enumerate_words([str(number) for number in (below, above) if number])


def _near_divisors(value: int, near: int) -> str:
    """The divisors of `value` on both sides of `near`, which is none itself."""
    divisors = sorted({d for low in range(1, math.isqrt(value) + 1) if value % low == 0 for d in (low, value // low)})
    below, above = [d for d in divisors if d < near][-1:], [d for d in divisors if d > near][:1]
    return enumerate_words([str(number) for number in (*below, *above)])


RULES = (
    Rule(_fits_world, ("parallel.dp", "parallel.tp", "parallel.pp")),
    Rule(_heads_divide_width, ("model.factory", "model.args.width", "model.args.heads")),
    Rule(_kv_heads_divide_heads, ("model.factory", "model.args.heads", "model.args.kv_heads")),
    Rule(
        _tp_divides_heads,
        (
            "model.factory",
            "model.args.heads",
            "model.args.kv_heads",
            "model.args.mlp_width",
            "parallel.tp",
            "parallel.tensor_plan",
        ),
    ),
    Rule(_sequence_is_cut, ("model.factory", "model.args.sequence", "data.sequence", "parallel.tp")),
    Rule(_sequence_fits_model, ("model.factory", "model.args.sequence", "data.sequence")),
    Rule(_tokens_have_a_file, ("data.source", "data.path", "data.factory")),
    Rule(_hf_model_is_given, ("model.factory", "model.args.path", "model.args.config")),
    Rule(_cosine_goes_down, ("optimizer.schedule", "optimizer.lr", "optimizer.min_lr")),
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
    Rule(_factories_exist("model.factory", lambda config: config.model.factory), ("model.factory",)),
    Rule(_factories_exist("model.loss", lambda config: config.model.loss), ("model.loss",)),
    Rule(_factories_exist("data.factory", lambda config: config.data.factory), ("data.factory",)),
    Rule(_one_source_of_data, ("data.path", "data.factory")),
    Rule(_table_is_used, ("comm.strategy", "comm.strategy_table")),
)
