"""Models as rows: where layers are found, what each stage has, what parameters are called and which are tied."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from parallel3d.models.layer_sequence import find_row
from parallel3d.models.layered import LayeredModel
from runtime.errors import InvalidCall


class Net(nn.Module):
    """One level: `first` and `second` before the blocks, `norm` and `head` after them."""

    def __init__(self, blocks: int = 3, tied: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Embedding(7, 4), nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 7, bias=False)
        if tied:
            self.head.weight = self.first.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        values = self.second(self.first(words))
        for block in self.blocks:
            values = block(values)
        return self.head(self.norm(values))


class Deep(nn.Module):
    """`body` is the level between."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Linear(4, 4)
        self.body = nn.ModuleDict({"early": nn.Linear(4, 4), "layers": nn.Sequential(), "late": nn.Linear(4, 4)})
        self.body.layers.extend(nn.Linear(4, 4) for _ in range(2))
        self.end = nn.Linear(4, 4)


def layered(model: nn.Module, pattern: str | None = "blocks.*", **options) -> LayeredModel:
    row = find_row(model, pattern)
    before, layers, after = ([path for path, _ in part] for part in (row.before, row.layers, row.after))
    return LayeredModel(model, tuple(before), tuple(layers), tuple(after), {}, lambda module: None, **options)


def paths(row) -> tuple[list[str], list[str], list[str]]:
    return tuple([path for path, _ in part] for part in (row.before, row.layers, row.after))


def test_children_beside_the_layers_come_before_and_after_them():
    row = find_row(Net(), "blocks.*")
    assert paths(row) == (["first", "second"], ["blocks.0", "blocks.1", "blocks.2"], ["norm", "head"])


def test_a_nested_pattern_takes_what_stands_beside_on_each_level():
    row = find_row(Deep(), "body.layers.*")
    assert paths(row) == (["start", "body.early"], ["body.layers.0", "body.layers.1"], ["body.late", "end"])


def test_a_star_alone_means_all_children():
    assert paths(find_row(nn.Sequential(nn.Tanh(), nn.Tanh()), "*")) == ([], ["0", "1"], [])


class Unregistered(Net):
    def pipeline_layers(self) -> list[nn.Module]:
        return [self.first, nn.Sequential(self.second, *self.blocks), nn.Tanh(), self.norm, self.head]


def test_layers_that_are_not_registered_are_called_after_their_place():
    assert paths(find_row(Unregistered())) == ([], ["first", "layer 1", "layer 2", "norm", "head"], [])


class OwnParameter(Net):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))


class ListBeside(Net):
    def __init__(self) -> None:
        super().__init__()
        self.more = nn.ModuleList([nn.Linear(4, 4)])


@pytest.mark.parametrize(
    ("model", "pattern", "message"),
    [
        (
            Net(),
            "block.*",
            "the pattern matches nothing: Net has the children first, second, blocks, norm, head.",
        ),
        (Net(), "blocks.inner.*", "the pattern matches nothing: blocks has the children 0, 1, 2."),
        (Net(), "blocks.0.x.*", "the pattern matches nothing: blocks.0 has no children."),
        (Net(), "blocks.1.*", "the pattern matches nothing: blocks.1 has no children."),
        (Net(), "blocks", "the pattern must end in its only star, such as blocks.*."),
        (Net(), "*.blocks.*", "the pattern must end in its only star, such as blocks.*."),
        (
            OwnParameter(),
            "blocks.*",
            "OwnParameter: no layer has the parameter scale. "
            "Put it into a module of its own that stands before or after the layers.",
        ),
        (
            ListBeside(),
            "blocks.*",
            "ListBeside: more is ModuleList, which cannot be called. "
            "Give the model a method pipeline_layers() that returns its layers in order.",
        ),
    ],
)
def test_what_is_no_row_is_refused(model, pattern, message):
    with pytest.raises(InvalidCall) as error:
        find_row(model, pattern)
    assert str(error.value) == message


@pytest.mark.parametrize("cut", [(3,), (1, 2), (2, 1), (1, 1, 1)])
def test_the_stages_one_after_the_other_are_the_model(cut):
    torch.manual_seed(0)
    model = layered(Net())
    words = torch.arange(7)
    values = words
    for stage in range(len(cut)):
        values = model.stage(cut, stage)(values)
    assert torch.equal(values, model.whole(words))


def test_before_and_after_belong_to_the_first_and_the_last_stage():
    model = layered(Net())
    assert [model.paths((1, 1, 1), stage) for stage in range(3)] == [
        ("first", "second", "blocks.0"),
        ("blocks.1",),
        ("blocks.2", "norm", "head"),
    ]
    names = [name for stage in range(3) for name, _ in model.stage((1, 1, 1), stage).named_children()]
    assert names == list("0123456")


@pytest.mark.parametrize(
    ("cut", "stage", "message"),
    [
        ((1, 2), 2, "stage 2: there are 2 stages, 0 to 1."),
        ((1, 2), -1, "stage -1: there are 2 stages, 0 to 1."),
        (
            (2, 2),
            0,
            "layers_per_stage = [2, 2]: adds up to 4 layers, but the model has 3. "
            "Give 2 numbers that add up to 3, for example [2, 1].",
        ),
    ],
)
def test_a_stage_that_does_not_exist_is_refused(cut, stage, message):
    with pytest.raises(InvalidCall) as error:
        layered(Net()).stage(cut, stage)
    assert str(error.value) == message


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


def test_what_adapt_gives_stands_in_the_stage_and_paths_stay_those_of_the_whole():
    model = layered(Net(), adapt=lambda path, module: Wrapped(module) if path.startswith("blocks") else module)
    stage = model.stage((1, 2), 1)
    assert [type(each) for each in stage.children()] == [Wrapped, Wrapped, nn.LayerNorm, nn.Linear]
    assert [path for path, _ in model.located(stage)] == ["blocks.1", "blocks.2", "norm", "head"]


def test_a_replaced_module_is_what_stages_and_names_have():
    model = layered(Net())
    other = model.whole.blocks[1] = nn.Linear(4, 4, bias=False)
    assert model.stage((1, 1, 1), 1).get_submodule("3") is other
    assert model.names()[id(other.weight)] == "blocks.1.weight"
    assert "blocks.1.bias" not in model.names().values()


def test_tied_parameters_go_by_their_first_path():
    free, tied = layered(Net()), layered(Net(tied=True))
    assert free.tied() == {}
    assert tied.tied() == {"first.weight": ("first.weight", "head.weight")}
    assert tied.names()[id(tied.whole.head.weight)] == "first.weight"
    assert set(free.names().values()) - set(tied.names().values()) == {"head.weight"}


def test_a_whole_model_can_be_its_only_layer():
    net = Net()
    model = LayeredModel(net, (), ("",), (), {}, lambda module: None)
    words = torch.arange(7)
    assert torch.equal(model.stage((1,), 0)(words), net(words))
    assert next(model.located(model.stage((1,), 0))) == ("", net)


def test_a_cut_counts_layers_and_weighs_what_is_before_and_after():
    model = layered(Net(blocks=4))
    model.whole.first = nn.Embedding(1000, 4)
    assert model.cut(2) == model.cut(2, "even") == (2, 2)
    assert model.cut(2, "parameters") == (1, 3)
    assert model.cut(2, [3, 1]) == (3, 1)
    with pytest.raises(InvalidCall, match="4 layers cannot be cut into 5 stages"):
        model.cut(5)


def test_a_cut_can_be_measured():
    model = layered(Net(blocks=2))
    assert model.cut(2, "profile", sample=torch.arange(7)) == (1, 1)
