"""First values: the same weights whatever the cut, and never more memory than a rank's part and one module."""

from __future__ import annotations

import copy
import gc
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from parallel3d.config.sections import GptArgs, LlamaArgs
from parallel3d.models.build import reset_parameters
from parallel3d.models.gpt import build_gpt
from parallel3d.models.layered import LayeredModel
from parallel3d.models.llama import build_llama
from parallel3d.models.materialize import materialize
from parallel3d.seeding import seed_of, seeded
from parallel3d.torch_internals import children_of
from runtime.errors import InvalidCall

Build = Callable[[], LayeredModel]
SMALL = {"layers": 4, "width": 8, "heads": 2, "vocabulary": 11, "sequence": 6}


def gpt(**args) -> Build:
    return lambda: build_gpt(GptArgs(**{**SMALL, **args}))


def llama(**args) -> Build:
    return lambda: build_llama(LlamaArgs(**{**SMALL, **args}))


def fill(model: LayeredModel, cut=(4,), stage=0, *, seed=5, dtype=torch.float32) -> dict[str, torch.Tensor]:
    """One stage's weights by their paths."""
    module = model.stage(cut, stage)
    materialize(model, model.located(module), seed, dtype, "cpu")
    names = model.names()
    return {names[id(each)]: each.detach() for each in module.parameters()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


# Seeds.


def test_a_seed_depends_on_the_runs_seed_and_the_path_and_has_63_bits():
    seeds = {seed_of(seed, path) for seed in range(50) for path in ("a", "a.b", "b", "")}
    assert len(seeds) == 200
    assert all(0 <= seed < 2**63 for seed in seeds)
    # Written down, because runs of other versions must begin with the same weights.
    assert seed_of(0, "blocks.0.attention.q") == 6092902996034244212


def test_random_numbers_go_on_as_if_nothing_had_been_drawn():
    def draw() -> tuple[float, float, float]:
        return torch.rand(()).item(), random.random(), float(np.random.random())

    with seeded(3):
        first = draw()
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    expected = draw()
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    with seeded(3):
        assert draw() == first
    assert draw() == expected


# The same weights on every mesh.

CUTS = [(4,), (1, 3), (2, 2), (1, 1, 1, 1)]


@pytest.mark.parametrize("build", [gpt(), gpt(tied=True), llama(kv_heads=1), llama(tied=True)])
@pytest.mark.parametrize("cut", CUTS)
def test_the_cut_into_stages_changes_no_weight(build, cut):
    whole = fill(build())
    for stage in range(len(cut)):
        # A model of its own for each stage, as each rank has.
        part = fill(build(), cut, stage)
        assert same(part, {name: whole[name] for name in part})


def test_the_order_of_modules_changes_no_weight():
    whole = fill(gpt(tied=True)())
    model = gpt(tied=True)()
    modules = [*model.located(model.stage((4,), 0))]
    materialize(model, modules[::-1], 5, torch.float32, "cpu")
    assert same(dict(model.whole.named_parameters()), whole)


def test_modules_may_be_given_with_or_without_what_is_inside_them():
    whole = fill(gpt()())
    model = gpt()()
    modules = [(path, model.module(path)) for path in model.row]
    materialize(model, modules, 5, torch.float32, "cpu")
    assert same(dict(model.whole.named_parameters()), whole)


def test_what_is_in_the_whole_goes_by_its_path_there():
    whole = fill(gpt()())
    model = gpt()()
    wrapped = nn.Sequential(nn.Identity(), model.module("blocks.2"))
    materialize(model, [("elsewhere", wrapped)], 5, torch.float32, "cpu")
    found = {name: each for name, each in model.whole.named_parameters() if not each.is_meta}
    assert same(found, {name: each for name, each in whole.items() if name.startswith("blocks.2.")})


def test_the_seed_changes_every_weight_that_is_drawn():
    one, other = fill(gpt()(), seed=1), fill(gpt()(), seed=2)
    unchanged = [name for name in one if torch.equal(one[name], other[name])]
    assert all("norm" in name or name.endswith("bias") for name in unchanged)


def test_every_precision_begins_with_the_same_values():
    weights = {dtype: fill(gpt()(), dtype=dtype) for dtype in (torch.float32, torch.float64, torch.bfloat16)}
    for dtype, found in weights.items():
        assert all(each.dtype == dtype for each in found.values())
        assert same(found, {name: each.to(dtype) for name, each in weights[torch.float32].items()})


def test_the_default_type_of_tensors_does_not_matter():
    whole = fill(gpt()())
    torch.set_default_dtype(torch.float64)
    try:
        assert same(fill(gpt()()), whole)
    finally:
        torch.set_default_dtype(torch.float32)


def test_parameters_stay_the_objects_they_are():
    model = gpt(tied=True)()
    names, kept = model.names(), list(model.whole.parameters())
    model.whole.head.weight.mark = "kept"
    model.whole.norm.bias.requires_grad_(False)
    fill(model)
    assert model.names() == names
    assert not any(each.is_meta for each in kept)
    assert model.whole.embedding.tokens.weight is model.whole.head.weight
    assert model.whole.head.weight.mark == "kept"
    assert not model.whole.norm.bias.requires_grad
    assert all(each.is_leaf and each.grad_fn is None for each in kept)


def test_what_other_stages_have_stays_on_meta():
    model = gpt()()
    fill(model, (1, 3), 1)
    real = {path.split(".")[0] for path, each in model.whole.named_parameters() if not each.is_meta}
    assert real == {"blocks", "norm", "head"}
    assert all(each.is_meta for each in model.whole.blocks[0].parameters())


def test_the_last_stage_of_a_tied_model_has_the_embeddings_values_alone():
    whole = fill(gpt(tied=True)())
    model = gpt(tied=True)()
    part = fill(model, (2, 2), 1)
    assert torch.equal(part["embedding.tokens.weight"], whole["embedding.tokens.weight"])
    assert "head.weight" not in part
    assert model.whole.embedding.positions.weight.is_meta


def test_first_values_are_those_of_gpt_2():
    whole = fill(gpt(width=64, vocabulary=500, layers=2)(), (2,))
    deviations = {name: each.std().item() for name, each in whole.items() if each.dim() == 2}
    for name, found in deviations.items():
        residual = name.endswith((".o.weight", "down.weight"))
        assert found == pytest.approx(0.01 if residual else 0.02, rel=0.1), name
    assert all(not each.any() for name, each in whole.items() if name.endswith("bias"))
    assert all((each == 1).all() for name, each in whole.items() if name.endswith("norm.weight"))


# Slices of modules.


class Slice(nn.Module):
    """Rows first to last of a Linear or an Embedding, as tensor parallelism has them."""

    def __init__(self, original: nn.Module, rank: int, size: int) -> None:
        super().__init__()
        rows = original.weight.shape[0]
        self.original, self.rank, self.size = [original], rank, size
        self.rows = slice(rows * rank // size, rows * (rank + 1) // size)
        for name, parameter in original.named_parameters():
            self.register_parameter(name, nn.Parameter(torch.empty_like(parameter[self.rows], device="meta")))

    def whole_module(self) -> nn.Module:
        return copy.deepcopy(self.original[0])

    def copy_shards(self, whole: nn.Module) -> None:
        for name, parameter in self.named_parameters():
            parameter.copy_(whole.get_parameter(name)[self.rows])


def cut_everything(model: LayeredModel, rank: int, size: int) -> LayeredModel:
    slices: dict[int, nn.Parameter] = {}
    for parent in list(model.whole.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear | nn.Embedding):
                part = Slice(child, rank, size)
                for key, parameter in child.named_parameters():
                    setattr(part, key, slices.setdefault(id(parameter), part.get_parameter(key)))
                setattr(parent, name, part)
    return model


@pytest.mark.parametrize("build", [gpt(), gpt(tied=True), llama()])
@pytest.mark.parametrize("cut", [(4,), (2, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_slices_are_those_of_the_seeded_whole(build, cut, dtype):
    whole = fill(build(), dtype=dtype)
    for stage in range(len(cut)):
        parts = [fill(cut_everything(build(), rank, 3), cut, stage, dtype=dtype) for rank in range(3)]
        for name, each in parts[0].items():
            together = each if "norm" in name else torch.cat([part[name] for part in parts])
            assert together.dtype == dtype
            assert torch.equal(together, whole[name])


def test_slices_of_a_real_model_are_taken_as_it_is():
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
    before = copy.deepcopy(whole.state_dict())
    model = LayeredModel(whole, (), ("0", "1", "2"), (), {}, reset_parameters)
    cut_everything(model, 1, 2)
    part = fill(model, (3,), dtype=torch.float64)
    expected = {name: each[each.shape[0] // 2 :].double() for name, each in before.items()}
    assert same(part, expected)


# Memory.


def live_bytes() -> int:
    """Of the real tensors that exist; other tests may have left some that have no storage to ask for."""
    storages = {
        each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
        for each in gc.get_objects()
        if issubclass(type(each), torch.Tensor) and each.device.type == "cpu" and each.layout is torch.strided
        if not each._is_zerotensor()
    }
    return sum(storages.values())


@pytest.mark.parametrize("size", [1, 4])
def test_no_rank_has_more_than_its_part_and_one_whole_module(size):
    model = gpt(width=64, heads=4, vocabulary=300, tied=True)()
    largest = max(sum(each.numel() for each in module.parameters(recurse=False)) for module in model.whole.modules())
    cut_everything(model, 0, size)
    peaks: list[int] = []

    def init(module: nn.Module) -> None:
        model.init(module)
        peaks.append(live_bytes())

    watched = LayeredModel(model.whole, model.before, model.layers, model.after, {}, init)
    gc.collect()
    before = live_bytes()
    part = fill(watched, (2, 2), 1)
    own = 4 * sum(each.numel() for each in part.values())
    assert live_bytes() - before == own
    assert len(peaks) > 10
    assert max(peaks) - before <= own + 4 * largest


# Models of other kinds.


class Counter(nn.Module):
    """Its buffer gets its values from reset_parameters, by assignment; so does what is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.empty(3))
        self.register_buffer("count", torch.ones((), dtype=torch.long), persistent=False)
        self.known = False

    def reset_parameters(self) -> None:
        self.table = torch.arange(3.0)
        self.known = True


def sequential(*modules: Callable[[], nn.Module]) -> LayeredModel:
    with torch.device("meta"):
        whole = nn.Sequential(*(make() for make in modules))
    return LayeredModel(whole, (), tuple(children_of(whole)), (), {}, reset_parameters)


def test_modules_of_torch_begin_as_torch_makes_them():
    model = sequential(lambda: nn.Linear(3, 5), lambda: nn.BatchNorm1d(5), lambda: nn.Conv1d(1, 2, 3), Counter)
    fill(model, (4,))
    expected = nn.Linear(3, 5)
    with seeded(seed_of(5, "0")):
        expected.reset_parameters()
    assert same(model.whole[0].state_dict(), expected.state_dict())
    assert same(model.whole[1].state_dict(), nn.BatchNorm1d(5).state_dict())
    assert model.whole[3].table.tolist() == [0, 1, 2]
    assert (model.whole[3].count.item(), model.whole[3].known) == (0, True)


def test_attention_of_torch_has_a_private_way_to_begin():
    model = sequential(lambda: nn.MultiheadAttention(4, 2))
    weights = fill(model, (1,))
    assert set(weights) == {"0.in_proj_weight", "0.in_proj_bias", "0.out_proj.weight", "0.out_proj.bias"}
    assert not any(each.is_meta or each.isnan().any() for each in weights.values())


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))


class Fails(Scale):
    def reset_parameters(self) -> None:
        raise RuntimeError("no")


def test_a_module_that_gets_no_values_is_refused_and_stays_on_meta():
    model = sequential(Scale)
    with pytest.raises(InvalidCall) as error:
        fill(model, (1,))
    assert str(error.value) == (
        "0.weight has no initial values: Scale is on meta, and nothing gave it any. "
        "Give it a method reset_parameters() that does, or build it with real memory."
    )
    assert model.whole[0].weight.is_meta


def test_a_module_whose_first_values_fail_is_named():
    model = sequential(nn.Identity, Fails)
    with pytest.raises(RuntimeError, match="no") as error:
        fill(model, (2,))
    assert error.value.__notes__ == ["This is from initializing 1 (Fails)."]
    assert model.whole[1].weight.is_meta


def test_a_real_model_is_only_converted():
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Embedding(2, 2))
    before, identities = copy.deepcopy(whole.state_dict()), [id(each) for each in whole.parameters()]
    model = LayeredModel(whole, (), ("0", "1", "2"), (), {}, reset_parameters)
    fill(model, (3,), dtype=torch.float64)
    after = whole.state_dict()
    assert [id(each) for each in whole.parameters()] == identities
    assert after["1.num_batches_tracked"].dtype == torch.int64
    assert same(after, {name: each.double() if each.is_floating_point() else each for name, each in before.items()})


def test_real_parameters_beside_those_on_meta_are_kept():
    model = sequential(lambda: nn.Linear(2, 3))
    model.whole[0].bias = nn.Parameter(torch.full((3,), 7.0))
    weights = fill(model, (1,))
    assert weights["0.bias"].tolist() == [7, 7, 7]
    assert not weights["0.weight"].isnan().any()


# Stored weights.


def stored(model: LayeredModel, values: dict[str, torch.Tensor]) -> LayeredModel:
    return LayeredModel(
        model.whole, model.before, model.layers, model.after, {}, refuse_to_draw, weights=values.__getitem__
    )


def refuse_to_draw(module: nn.Module) -> None:
    assert not list(module.parameters(recurse=False))


@pytest.mark.parametrize("build", [gpt(), gpt(tied=True)])
@pytest.mark.parametrize("sliced", [False, True])
def test_stored_weights_are_taken_instead_of_drawn_ones(build, sliced):
    values = {name: each.bfloat16() for name, each in fill(build(), seed=99).items()}
    model = stored(build(), values)
    if sliced:
        cut_everything(model, 0, 2)
    for name, each in fill(model, (1, 3), 1).items():
        expected = values[name].float()
        assert torch.equal(each, expected if each.shape == expected.shape else expected[: each.shape[0]])


def test_a_stored_weight_of_another_shape_is_refused():
    values = fill(gpt()())
    values["head.weight"] = torch.zeros(5, 8)
    with pytest.raises(InvalidCall) as error:
        fill(stored(gpt()(), values))
    assert str(error.value) == "head.weight: the stored weight's shape is (5, 8), but the model's is (11, 8)."
