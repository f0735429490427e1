"""Plans and what they make of a model: tables, cut modules, first values; and what is refused, by name."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from parallel3d.config.sections import GptArgs, LlamaArgs
from parallel3d.gradients.finalize import needs_tp_sum
from parallel3d.models.build import reset_parameters
from parallel3d.models.gpt import build_gpt
from parallel3d.models.layered import LayeredModel
from parallel3d.models.llama import build_llama
from parallel3d.models.materialize import materialize
from parallel3d.tensor.layers import ColumnLinear, RowLinear, ShardedModule, ShardSlice, shard_slice_of
from parallel3d.tensor.shards import Shards, apply_shards, plan_shards
from parallel3d.tensor.vocabulary import VocabEmbedding, VocabHead
from runtime.errors import ConfigError, InvalidCall

SMALL: dict[str, Any] = {"layers": 2, "width": 8, "heads": 2, "vocabulary": 11, "sequence": 6}


def gpt(**args: Any) -> LayeredModel:
    return build_gpt(GptArgs(**{**SMALL, **args}))


def llama(**args: Any) -> LayeredModel:
    return build_llama(LlamaArgs(**{**SMALL, **args}))


def alone(rank: int, size: int = 2) -> Any:
    """Enough of an exchange to cut modules for it."""
    return SimpleNamespace(rank=rank, size=size, waited=0.0)


def planned(model: LayeredModel, tp: int = 2, cut: tuple[int, ...] = (2,), **options: Any) -> Shards:
    return plan_shards(model, model.plan, tp, layers_per_stage=cut, **options)


def row(*modules: nn.Module, plan: dict[str, str] | None = None, layers: slice | None = None) -> LayeredModel:
    """A model whose modules are its children, called 0, 1 and so on."""
    paths = tuple(str(index) for index in range(len(modules)))
    layers = layers or slice(0, len(paths))
    before, after = paths[: layers.start], paths[layers.stop :]
    return LayeredModel(nn.Sequential(*modules), before, paths[layers], after, plan or {}, reset_parameters)


# Heads.


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (gpt(width=24, heads=3), "model.args.heads(3) is no multiple of tp(2). Set tp to 1 or 3"),
        (llama(width=24, heads=6, kv_heads=3, mlp_width=8), "model.args.kv_heads(3) is no multiple of tp(2)."),
    ],
    ids=["gpt", "llama"],
)
def test_heads_that_do_not_divide_are_refused_with_any_plan(model, words):
    plan = {"blocks.*.attention.[qkv]": "column", "blocks.*.attention.o": "row"}
    with pytest.raises(ConfigError) as refused:
        plan_shards(model, plan, 2, layers_per_stage=(2,))
    text = " ".join(str(refused.value).split())
    assert text.startswith(f"parallel.tp = 2: blocks.0.attention.q (column) splits heads, but {words}")
    plan_shards(model, {"blocks.*.mlp.*": "column", "blocks.*.mlp.down": "row"}, 2, layers_per_stage=(2,))


# Tables.


def test_the_table_of_a_gpt():
    shards = planned(gpt(), cut=(1, 1))
    lines = [
        (each.path, each.kind, each.stage, each.strategy, each.pattern, each.local_shape, each.num_parameters)
        for each in shards
        if "blocks.1" not in each.path
    ]
    assert lines == [
        ("embedding.tokens", "embedding", 0, "vocab", "AllReduce", (6, 8), 48),
        ("embedding.positions", "embedding", 0, "replicated", None, (6, 8), 48),
        ("blocks.0.attention_norm", "norm", 0, "replicated", None, (8,), 16),
        ("blocks.0.attention.q", "attention", 0, "column", "AllReduce", (4, 8), 36),
        ("blocks.0.attention.k", "attention", 0, "column", "AllReduce", (4, 8), 36),
        ("blocks.0.attention.v", "attention", 0, "column", "AllReduce", (4, 8), 36),
        ("blocks.0.attention.o", "attention", 0, "row", "AllReduce", (8, 4), 40),
        ("blocks.0.mlp_norm", "norm", 0, "replicated", None, (8,), 16),
        ("blocks.0.mlp.up", "MLP", 0, "column", "AllReduce", (16, 8), 144),
        ("blocks.0.mlp.down", "MLP", 0, "row", "AllReduce", (8, 16), 136),
        ("norm", "norm", 1, "replicated", None, (8,), 16),
        ("head", "linear", 1, "vocab", "AllReduce", (6, 8), 48),
    ]
    assert [each.stage for each in shards if "blocks.1" in each.path] == [1] * 8
    assert next(iter(shards)).whole_shape == (11, 8)
    assert shards.head == "head"
    assert shards.sequence is None
    assert [shards.logits_slice(rank) for rank in (0, 1)] == [ShardSlice(0, 0, 6, 11), ShardSlice(0, 6, 11, 11)]


def test_what_is_exchanged_where_the_sequence_is_cut():
    shards = planned(llama(), sequence_parallel=True)
    patterns = {each.path: each.pattern for each in shards}
    assert patterns["blocks.0.attention.q"] == patterns["blocks.1.mlp.gate"] == "AllGatherThenReduceScatter"
    assert patterns["blocks.0.attention.o"] == patterns["blocks.1.mlp.down"] == "ReduceScatterThenAllGather"
    assert patterns["embedding.tokens"] == patterns["head"] == "AllReduce"
    assert patterns["blocks.0.mlp_norm"] is None
    assert shards.sequence == ("blocks.0", "blocks.1")


def test_one_rank_has_all():
    shards = planned(gpt(), 1, sequence_parallel=True)
    assert {(each.strategy, each.pattern) for each in shards} == {("replicated", None)}
    assert (shards.head, shards.sequence, shards.logits_slice(0)) == (None, None, None)
    assert shards.num_parameters() == sum(each.numel() for each in gpt().whole.parameters())
    model = gpt()
    before = list(model.whole.modules())
    assert apply_shards(model, shards, alone(0, 1)) is None
    assert list(model.whole.modules()) == before


@pytest.mark.parametrize("tied", [False, True])
def test_numbers_of_parameters(tied):
    shards = planned(gpt(tied=tied), 2, (1, 1))
    for rank in (0, 1):
        model = gpt(tied=tied)
        apply_shards(model, shards, alone(rank))
        stages = [model.stage((1, 1), stage) for stage in (0, 1)]
        numbers = [sum(each.numel() for each in stage.parameters()) for stage in stages]
        assert [shards.num_parameters([stage], rank) for stage in (0, 1)] == numbers
        assert shards.num_parameters(rank=rank) == sum(each.numel() for each in model.whole.parameters())


def test_half_of_the_parameters_are_on_a_rank():
    shards = planned(gpt(width=64, heads=4, vocabulary=256))
    whole = sum(each.numel() for each in gpt(width=64, heads=4, vocabulary=256).whole.parameters())
    assert shards.num_parameters() < 0.52 * whole


# Patterns.


def strategies(plan: dict[str, str], model: LayeredModel | None = None) -> dict[str, str]:
    model = gpt() if model is None else model
    shards = plan_shards(model, plan, 2, layers_per_stage=(len(model.layers),))
    return {each.path: each.strategy for each in shards if each.strategy != "replicated"}


def test_the_last_pattern_counts():
    plan = {"blocks.*.mlp.up": "column", "blocks.*.mlp.down": "row", "blocks.1": "replicated"}
    assert strategies(plan) == {"blocks.0.mlp.up": "column", "blocks.0.mlp.down": "row"}
    plan |= {"blocks.[1].mlp.up": "column", "blocks.1.mlp.dow?": "row"}
    assert len(strategies(plan)) == 4
    assert strategies({"head": "vocab", "*": "replicated"}) == {}


def test_a_star_stands_for_one_name():
    assert {*strategies({"blocks.*.*.up": "column", "*.*.mlp.down": "row"})} == {
        f"blocks.{block}.mlp.{name}" for block in (0, 1) for name in ("up", "down")
    }


def refused(plan: dict[str, str], model: LayeredModel | None = None, tp: int = 2, **options: Any) -> str:
    model = gpt() if model is None else model
    with pytest.raises(ConfigError) as caught:
        plan_shards(model, plan, tp, **{"layers_per_stage": (len(model.layers),), **options})
    return " ".join(str(caught.value).split())


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (
            {"blocks.*.atention.q": "column"},
            'parallel.tensor_plan["blocks.*.atention.q"] = "column": no module has such a path. The '
            "nearest is blocks.0.attention.q.",
        ),
        (
            {"xyz": "row"},
            'parallel.tensor_plan["xyz"] = "row": no module has such a path. There are, for example, '
            "embedding.tokens, embedding.positions, blocks.0.attention.q.",
        ),
        (
            {"blocks.*.mlp_norm": "column"},
            'parallel.tensor_plan["blocks.*.mlp_norm"] = "column": blocks.0.mlp_norm is LayerNorm, not '
            "Linear. Name a Linear.",
        ),
        (
            {"embedding.tokens": "row"},
            'parallel.tensor_plan["embedding.tokens"] = "row": embedding.tokens is Embedding, not '
            "Linear. Use vocab for an Embedding.",
        ),
        (
            {"norm": "vocab"},
            'parallel.tensor_plan["norm"] = "vocab": norm is LayerNorm, which has no vocabulary. Name an '
            "Embedding or a Linear.",
        ),
        (
            {"blocks.*.mlp.up": "vocab"},
            'parallel.tensor_plan["blocks.*.mlp.up"] = "vocab": blocks.0.mlp.up is a Linear, but what '
            "the model calls last is head. Use column, and row for what comes after it.",
        ),
        (
            {"blocks.*.mlp.up": "column"},
            "parallel.tensor_plan: blocks.1 has a column, but no row follows: its output would stay "
            "sharded. Add a row, or vocab for the last Linear of a model.",
        ),
        (
            {"blocks.1.mlp.down": "row"},
            "parallel.tensor_plan: blocks.1 has a row, but there is no column before it. Add a column, "
            "or have it replicated.",
        ),
    ],
    ids=["mistyped", "nothing near", "no Linear", "Embedding", "no vocabulary", "not last", "no row", "no column"],
)
def test_plans_that_do_not_fit(plan, text):
    assert refused(plan) == text


def test_a_plan_that_nobody_uses_yet_has_to_fit_too():
    """Where tp is 1, a mistake in it would wait for the first run with more."""
    assert "no module has such a path." in refused({"blocks.*.atention.q": "column"}, tp=1)
    assert "not Linear." in refused({"norm": "column"}, tp=1)


def test_the_models_own_plan_is_named_as_such():
    model = row(nn.Linear(4, 4), plan={"7": "column"})
    assert refused(model.plan, model).startswith('the model\'s tensor_plan["7"] = "column": no module')


@pytest.mark.parametrize(
    ("strategy", "sizes", "tp", "text"),
    [
        (
            "column",
            (6, 10),
            4,
            "has 10 outputs, which is no multiple of tp(4). Set tp to 2, or give it 8 or 12 outputs",
        ),
        ("row", (7, 8), 3, "has 7 inputs, which is no multiple of tp(3). Set tp to 1, or give it 6 or 9 inputs, or"),
        ("column", (6, 3), 4, "has 3 outputs, which is no multiple of tp(4). Set tp to 3, or give it 4 outputs, or"),
        ("vocab", (6, 3), 4, "has 3 rows, fewer than there are ranks. Set it to 3 at most."),
    ],
)
def test_sizes_that_do_not_divide(strategy, sizes, tp, text):
    found = refused({"0": strategy}, row(nn.Linear(*sizes)), tp)
    assert found.startswith(f"parallel.tp = {tp}: 0 ({strategy}) {text}")


@pytest.mark.parametrize("option", ["max_norm", "sparse", "scale_grad_by_freq"])
def test_embeddings_that_cannot_be_cut(option):
    model = row(nn.Embedding(7, 4, **{option: 1.0 if option == "max_norm" else True}))
    assert f"0 has {option}, which does not work on a shard of its rows. Have it replicated." in refused(
        {"0": "vocab"}, model
    )


class Doubled(nn.Linear):
    def forward(self, values):
        return 2 * super().forward(values)


def test_a_linear_with_a_forward_of_its_own():
    assert "0 is Doubled, not Linear." in refused({"0": "column"}, row(Doubled(4, 4)))


class Plain(nn.Linear):
    """Derived, but the same forward."""


def test_a_linear_that_is_derived():
    model = row(Plain(4, 4), nn.Tanh(), nn.Linear(4, 4), plan={"0": "column", "2": "row"})
    apply_shards(model, planned(model, cut=(3,)), alone(0))
    assert isinstance(model.whole[0], ColumnLinear)
    assert type(model.whole[0].whole_module()) is Plain


def test_tied_parameters_are_cut_alike():
    text = "embedding.tokens (vocab) and head (replicated) share one parameter, but are sharded in different ways."
    assert text in refused({"embedding.tokens": "vocab"}, gpt(tied=True))


def test_a_model_that_is_one_linear():
    model = LayeredModel(nn.Linear(4, 4), (), ("",), (), {}, reset_parameters)
    assert 'tensor_plan[""] = "vocab": the model itself cannot be replaced.' in refused({"": "vocab"}, model)


def test_stages_end_with_whole_values():
    modules = (nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
    plan = {"0": "column", "2": "row"}
    plan_shards(row(*modules), plan, 2, layers_per_stage=(3, 1))
    text = refused(plan, row(*modules), layers_per_stage=(2, 2))
    assert text == (
        "pipeline.layers_per_stage = [2, 2]: stage 0 ends between the column in 0 and its row. End the stage "
        "after the row."
    )


def test_where_the_sequence_cannot_be_cut():
    text = refused({"head": "vocab"}, sequence_parallel=True)
    assert text.endswith(
        "parallel.sequence_parallel = true: parallel.tensor_plan has no columns and rows. Set it to false."
    )
    model = LayeredModel(gpt().whole, (), ("",), (), {}, reset_parameters)
    text = refused(dict(gpt().plan), model, sequence_parallel=True)
    assert "the model itself has a vocabulary, which needs the whole sequence on each rank" in text


def test_a_sequence_is_not_cut_for_one_of_two_places_of_a_parameter():
    model = gpt()
    model.whole.norm.weight = model.whole.blocks[1].mlp_norm.weight
    planned(model)
    text = "blocks.1.mlp_norm and norm share one parameter, but not all of them are between columns and rows."
    assert text in refused(dict(model.plan), model, sequence_parallel=True)
    model.whole.norm = gpt().whole.norm
    model.whole.blocks[0].mlp_norm.weight = model.whole.blocks[1].mlp_norm.weight
    planned(model, sequence_parallel=True)


# Sharded modules.


def test_what_is_cut_is_replaced():
    model = gpt()
    apply_shards(model, planned(model), alone(1))
    kinds = {path: type(each) for path, each in model.whole.named_modules() if isinstance(each, ShardedModule)}
    assert kinds == {
        "embedding.tokens": VocabEmbedding,
        **{
            f"blocks.{block}.{name}": RowLinear if name in ("attention.o", "mlp.down") else ColumnLinear
            for block in (0, 1)
            for name in ("attention.q", "attention.k", "attention.v", "attention.o", "mlp.up", "mlp.down")
        },
        "head": VocabHead,
    }
    cuts = {path: shard_slice_of(each) for path, each in model.whole.named_parameters() if "blocks.1" not in path}
    assert cuts["embedding.tokens.weight"] == cuts["head.weight"] == ShardSlice(0, 6, 11, 11)
    assert cuts["blocks.0.attention.q.weight"] == cuts["blocks.0.attention.q.bias"] == ShardSlice(0, 4, 8, 8)
    assert cuts["blocks.0.mlp.down.weight"] == ShardSlice(1, 16, 32, 32)
    assert cuts["blocks.0.mlp.down.bias"] is cuts["norm.weight"] is None
    assert not any(map(needs_tp_sum, model.whole.parameters()))
    assert all(each.is_meta for each in model.whole.parameters())
    assert "weight=(4, 8) of (8, 8)" in repr(model.whole.blocks[0].attention.q)


def test_an_exchange_of_another_size():
    with pytest.raises(InvalidCall, match=r"^the shards are for tp = 2, but the exchange has 3 ranks\.$"):
        apply_shards(gpt(), planned(gpt()), alone(0, 3))


def fill(model: LayeredModel, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    materialize(model, [("", model.whole)], 3, dtype, "cpu")
    return dict(model.whole.named_parameters())


@pytest.mark.parametrize("build", [gpt, llama], ids=["gpt", "llama"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_rank_begins_with_its_part_of_the_same_weights(build, tied, dtype):
    whole = fill(build(tied=tied), dtype)
    for rank in (0, 1):
        model = build(tied=tied)
        apply_shards(model, planned(model, sequence_parallel=True), alone(rank))
        for path, parameter in fill(model, dtype).items():
            cut = shard_slice_of(parameter)
            assert torch.equal(parameter, whole[path] if cut is None else cut.of(whole[path])), path
        assert (model.whole.head.weight is model.whole.embedding.tokens.weight) is tied
        norm = model.whole.blocks[0].attention_norm.weight
        assert needs_tp_sum(norm), "what is known of parameters outlives their first values"


def test_real_weights_are_taken_as_they_are():
    """A user's factory may give them."""
    torch.manual_seed(1)
    modules = nn.Embedding(7, 4), nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4), nn.Linear(4, 7, bias=False)
    modules[4].weight = modules[0].weight
    values = {f"{index}.{name}": each.detach().clone() for index, module in enumerate(modules)
              for name, each in module.named_parameters()}  # fmt: skip
    plan = {"0": "vocab", "1": "column", "3": "row", "4": "vocab"}
    model, weight = row(*modules, plan=plan), weakref.ref(modules[0].weight)
    del modules
    apply_shards(model, planned(model, cut=(5,)), alone(1))
    assert model.whole[0].weight is model.whole[4].weight
    for path, parameter in fill(model).items():
        cut = shard_slice_of(parameter)
        assert torch.equal(parameter, values[path] if cut is None else cut.of(values[path])), path
    gc.collect()
    assert weight() is None, "the whole weight is let go"


def test_a_module_with_two_places_stays_one():
    shared = nn.Linear(4, 4)
    model = row(nn.Linear(4, 4), shared, nn.Tanh(), shared, plan={"0": "column", "[13]": "row"})
    model.whole[0] = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    plan = {"0.1": "column", "[13]": "row"}
    apply_shards(model, plan_shards(model, plan, 2, layers_per_stage=(4,)), alone(0))
    assert model.whole[1] is model.whole[3]
    assert isinstance(model.whole[1], RowLinear)
