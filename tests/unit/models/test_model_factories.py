"""The model that a configuration names: the built-in ones, the user's own, and what is told when it cannot be had."""

from __future__ import annotations

import importlib
import itertools
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from parallel3d.config import load_config
from parallel3d.config.factories import load_factory
from parallel3d.models.build import build_model
from parallel3d.models.gpt import Gpt
from parallel3d.models.layered import LayeredModel
from parallel3d.models.llama import Llama
from parallel3d.models.materialize import materialize
from runtime.errors import ConfigError

NUMBERS = itertools.count()

HEADER = """\
import random
import numpy
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, blocks=4, width=6):
        super().__init__()
        self.front = nn.Linear(3, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))
        self.back = nn.Linear(width, 2)

    def forward(self, values):
        values = self.front(values)
        for block in self.blocks:
            values = block(values)
        return self.back(values)

"""

LINES = HEADER.count("\n")
Write = Callable[[str], str]


@pytest.fixture
def write(here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Puts a module of the user's into the current folder and gives its name, which no test has used before."""
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def write(text: str, header: str = HEADER) -> str:
        name = f"users_{next(NUMBERS)}"
        (here / f"{name}.py").write_text(header + text)
        return name

    yield write
    for name in set(sys.modules) - before:
        if name.startswith("users_"):
            del sys.modules[name]


def build(factory: str, **overrides) -> LayeredModel:
    keys = {name.replace("__", "."): value for name, value in overrides.items()}
    return build_model(load_config(None, overrides={"model.factory": factory, **keys}, environ={}))


def refusal(factory: str, **overrides) -> str:
    with pytest.raises(ConfigError) as error:
        build(factory, **overrides)
    return str(error.value)


# The built-in ones.


@pytest.mark.parametrize(("factory", "kind"), [("gpt", Gpt), ("llama", Llama)])
def test_the_built_in_ones_are_on_meta(factory, kind):
    model = build(factory, model__args__layers=2, model__args__width=32)
    assert type(model.whole) is kind
    assert len(model.layers) == 2
    assert all(each.is_meta for each in model.whole.parameters())


def test_hugging_face_models_are_built_elsewhere(monkeypatch):
    wanted = build("gpt", model__args__layers=2)
    module = types.ModuleType("parallel3d.models.hf")
    module.build_hf = lambda config: wanted if config.model.factory == "hf" else None
    monkeypatch.setitem(sys.modules, "parallel3d.models.hf", module)
    assert build("hf", model__args__config={"model_type": "llama"}) is wanted


# The user's own.


def test_a_factory_gets_its_arguments_and_the_current_folder_is_on_the_path(write, here):
    name = write("def build(blocks, width):\n    return Net(blocks, width)\n")
    sys.path[:] = [each for each in sys.path if each not in ("", str(here))]
    model = build(f"{name}:build", model__args={"blocks": 2, "width": 5}, model__layers="blocks.*")
    assert model.whole.back.in_features == 5
    assert (model.before, model.layers, model.after) == (("front",), ("blocks.0", "blocks.1"), ("back",))
    assert model.plan == {}


def test_a_class_and_an_attribute_of_one_are_factories_too(write):
    name = write("class Models:\n    small = staticmethod(lambda: nn.Sequential(nn.Linear(2, 2)))\n")
    assert type(build(f"{name}:Net", model__layers="blocks.*").whole).__name__ == "Net"
    assert build(f"{name}:Models.small").layers == ("0",)


RANDOM = """
def build():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].bias.data.fill_(random.random() + numpy.random.random())
    return model
"""


def test_every_rank_gets_the_same_model_and_random_numbers_go_on(write):
    name = write(RANDOM)
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    models = [build(f"{name}:build", train__seed=seed) for seed in (1, 1, 2)]
    assert torch.equal(torch.rand(3), expected)
    first, again, other = (model.whole.state_dict() for model in models)
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not any(torch.equal(first[key], other[key]) for key in first)
    torch.manual_seed(1)
    assert torch.equal(nn.Linear(3, 3).weight, first["0.weight"])


def test_a_sequential_needs_no_pattern(write):
    name = write("def build():\n    return nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))\n")
    model = build(f"{name}:build", parallel__pp=3)
    assert (model.before, model.layers, model.after) == ((), ("0", "1", "2"), ())


LISTED = """
class Listed(Net):
    def pipeline_layers(self):
        return [self.front, nn.Tanh(), *self.blocks, nn.Sequential(nn.Tanh(), self.back)]

    def forward(self, values):
        for layer in self.pipeline_layers():
            values = layer(values)
        return values
"""


def test_layers_may_be_made_when_asked_for(write):
    model = build(f"{write(LISTED)}:Listed", parallel__pp=2)
    assert model.layers == ("front", "layer 1", *(f"blocks.{index}" for index in range(4)), "layer 6")
    values = torch.randn(2, 3)
    passed = values
    for stage in range(2):
        passed = model.stage((3, 4), stage)(passed)
    assert torch.equal(passed, model.whole(values))
    assert set(model.names().values()) == {
        f"{path}.{name}" for path in ("front", *model.layers[2:6], "back") for name in ("weight", "bias")
    }


def test_a_model_that_cannot_be_cut_is_one_layer(write):
    model = build(f"{write('')}:Net")
    assert (model.before, model.layers, model.after) == ((), ("",), ())
    values = torch.randn(2, 3)
    assert torch.equal(model.stage((1,), 0)(values), model.whole(values))


META = """
def build():
    with torch.device("meta"):
        return Net()
"""


def test_a_model_on_meta_gets_the_values_of_its_paths(write):
    name = write(META)

    def weights(layers: str | None, paths: list[str]) -> dict[str, torch.Tensor]:
        model = build(f"{name}:build", model__layers=layers)
        materialize(model, [(path, model.module(path)) for path in paths], 4, torch.float32, "cpu")
        return {key: each for key, each in model.whole.state_dict().items() if not each.is_meta}

    whole, part = weights(None, [""]), weights("blocks.*", ["blocks.2", "back"])
    assert sorted(part) == ["back.bias", "back.weight", "blocks.2.bias", "blocks.2.weight"]
    assert all(torch.equal(value, whole[key]) for key, value in part.items())


PLANS = """
class Attribute(Net):
    tensor_plan = {"blocks.*": "column"}

class Method(Net):
    def tensor_plan(self):
        return {"back": "row"}
"""


def test_a_model_may_have_a_plan_of_its_own(write):
    name = write(PLANS)
    assert build(f"{name}:Attribute").plan == {"blocks.*": "column"}
    assert build(f"{name}:Method").plan == {"back": "row"}


# What goes wrong.


def told(key: str, value: str, *lines: str) -> str:
    return "\n".join((f"{key} = {value}: {lines[0]}", *lines[1:]))


def test_a_name_that_is_not_there(write):
    name = write("def build():\n    return Net()\n")
    assert refusal(f"{name}:biuld") == told(
        "model.factory", f'"{name}:biuld"', f"{name} has no biuld.", "Did you mean build?"
    )
    assert refusal(f"{name}:qqqqqqq") == told(
        "model.factory", f'"{name}:qqqqqqq"', f"{name} has no qqqqqqq.", "Check the name after the colon."
    )


def test_a_name_that_cannot_be_called(write):
    name = write("size = 3\n")
    assert refusal(f"{name}:size") == told(
        "model.factory",
        f'"{name}:size"',
        "size is a value of type int, which cannot be called.",
        "Name a function or a class.",
    )


def test_something_else_than_a_model(write):
    name = write("def build():\n    return [Net()]\n")
    assert refusal(f"{name}:build") == told(
        "model.factory",
        f'"{name}:build"',
        "it returned a value of type list, which is no nn.Module.",
        "Return the model.",
    )


@pytest.mark.parametrize(
    ("text", "line", "error"),
    [
        ("def build():\n    raise ValueError('too\\nsmall')\n", 2, "ValueError: too small"),
        ("def build():\n    return nn.Linear(2, 'wide')\n", 2, "TypeError: "),
        ("def build():\n    raise SystemExit(3)\n", 2, "SystemExit: 3"),
        ("def build():\n    inner()\n\ndef inner():\n    nn.Linear(-1, 1)\n", 5, "RuntimeError: "),
    ],
)
def test_a_factory_that_raises(write, text, line, error):
    name = write(text)
    found = refusal(f"{name}:build")
    assert found.startswith(f'model.factory = "{name}:build": it was called with no arguments, and raised {error}')
    assert found.endswith(f" ({name}.py:{LINES + line}).\nMend it, or name another.")
    assert found.count("\n") == 1


def test_an_argument_that_the_factory_does_not_take_is_named(write):
    name = write("def build(width=2):\n    return Net()\n")
    assert refusal(f"{name}:build", model__args={"wdith": 3}) == told(
        "model.args.wdith",
        "3",
        f"{name}:build was called with it, and raised TypeError: build() got an unexpected keyword argument 'wdith'.",
        "Did you mean width?",
    )
    assert refusal(f"{name}:build", model__args={"width": 3, "a-b": "x"}) == told(
        "model.args.a-b",
        '"x"',
        f"{name}:build was called with it, and raised TypeError: build() got an unexpected keyword argument 'a-b'.",
        "Remove it, or name another factory.",
    )


def test_also_where_the_factory_hands_it_on(write):
    name = write("def build(**options):\n    return Net(**options)\n")
    found = refusal(f"{name}:build", model__args={"blocks": 2, "wdith": 3})
    assert found.startswith(f"model.args.wdith = 3: {name}:build was called with it, and raised TypeError: Net.")
    assert f"got an unexpected keyword argument 'wdith' ({name}.py:{LINES + 2})." in found


def test_an_argument_that_the_factory_takes_and_misuses_is_its_own_fault(write):
    name = write("def build(width):\n    return nn.Linear(width=width)\n")
    found = refusal(f"{name}:build", model__args={"width": 3})
    assert found.startswith(f'model.factory = "{name}:build": it was called with width, and raised TypeError: ')


@pytest.mark.parametrize(
    ("given", "shown", "message", "remedy"),
    [
        ({"blocks": 2}, '{"blocks": 2}', "needs width.", "Give it there."),
        ({}, "{}", "needs blocks and width.", "Give them there."),
    ],
)
def test_arguments_that_are_missing(write, given, shown, message, remedy):
    name = write("def build(blocks, *, width, other=1):\n    return Net()\n")
    found = refusal(f"{name}:build", model__args=given)
    assert found == told("model.args", shown, f"{name}:build {message}", remedy)


def test_arguments_may_have_any_name(write):
    name = write("def build(key, name):\n    return nn.Sequential(nn.Linear(key, name))\n")
    assert build(f"{name}:build", model__args={"key": 2, "name": 3}).whole[0].out_features == 3


def test_a_factory_without_a_signature(write):
    name = write("build = range\n")
    found = refusal(f"{name}:build", model__args={"width": 3})
    assert found.startswith(f'model.factory = "{name}:build": it was called with width, and raised TypeError: ')


@pytest.mark.parametrize(
    ("text", "line", "error"),
    [
        ("x = 1 / 0\n", 1, "ZeroDivisionError: division by zero"),
        ("import not_there_3d\n", 1, "ModuleNotFoundError: No module named 'not_there_3d'"),
        ("def build(:\n", 1, "SyntaxError: "),
        ("raise SystemExit('no')\n", 1, "SystemExit: no"),
    ],
)
def test_a_module_that_cannot_be_imported(write, text, line, error):
    name = write(text)
    found = refusal(f"{name}:build")
    assert found.startswith(f'model.factory = "{name}:build": {name} cannot be imported: {error}')
    assert found.endswith(f" ({name}.py:{LINES + line}).\nTry: python -c 'import {name}'.")


def test_an_error_elsewhere_is_told_with_its_place(here, write):
    (here / "deeper").mkdir()
    (here / "deeper" / "inside_3d.py").write_text("import json\n\ndef fail():\n    json.loads('{')\n")
    name = write("import sys\nsys.path.append('deeper')\nimport inside_3d\nbuild = inside_3d.fail\n")
    assert "raised json.decoder.JSONDecodeError: Expecting property name" in refusal(f"{name}:build")
    assert "(deeper/inside_3d.py:4)" in refusal(f"{name}:build")
    del sys.modules["inside_3d"]


def test_the_cause_is_kept(write):
    name = write("def build():\n    raise ValueError('why')\n")
    with pytest.raises(ConfigError) as error:
        build(f"{name}:build")
    assert isinstance(error.value.__cause__, ValueError)


def test_a_model_that_cannot_be_cut_needs_one_stage(write):
    name = write("")
    assert refusal(f"{name}:Net", parallel__pp=2) == told(
        "model.factory",
        f'"{name}:Net"',
        "Net cannot be cut into stages: it is no nn.Sequential. "
        "Give it a method pipeline_layers() that returns its layers in order.",
        "Or say with model.layers where they are, such as blocks.*; else it can have 1 stage, not 2.",
    )


def test_a_pattern_that_matches_nothing(write):
    name = write("")
    assert refusal(f"{name}:Net", model__layers="layers.*") == told(
        "model.layers", '"layers.*"', "the pattern matches nothing: Net has the children front, blocks, back."
    )


@pytest.mark.parametrize(
    ("overrides", "key", "value", "message"),
    [
        (
            {"parallel__pp": 6},
            "parallel.pp",
            "6",
            "4 layers cannot be cut into 6 stages, for each needs at least one. The most stages possible is 4: "
            "use fewer pipeline ranks or virtual stages, or more layers.",
        ),
        (
            {"parallel__pp": 2, "pipeline__layers_per_stage": [2, 3]},
            "pipeline.layers_per_stage",
            "[2, 3]",
            "layers_per_stage = [2, 3]: adds up to 5 layers, but the model has 4. "
            "Give 2 numbers that add up to 4, for example [2, 2].",
        ),
        (
            {"parallel__pp": 5, "pipeline__layers_per_stage": "profile"},
            "pipeline.layers_per_stage",
            '"profile"',
            "4 layers cannot be cut into 5 stages, for each needs at least one. The most stages possible is 4: "
            "use fewer pipeline ranks or virtual stages, or more layers.",
        ),
    ],
)
def test_a_number_of_layers_that_does_not_fit(write, overrides, key, value, message):
    assert refusal(f"{write('')}:Net", model__layers="blocks.*", **overrides) == told(key, value, message)


def test_pipeline_layers_that_raises_or_loses_a_parameter(write):
    raises = "class Model(Net):\n    def pipeline_layers(self):\n        return [self.missing]\n"
    name = write(raises)
    found = refusal(f"{name}:Model", parallel__pp=2)
    assert "pipeline_layers() raised AttributeError: 'Model' object has no attribute 'missing'" in found
    assert found.endswith(f" ({name}.py:{LINES + 3}).")
    loses = "class Model(Net):\n    def pipeline_layers(self):\n        return [*self.blocks]\n"
    name = write(loses)
    assert refusal(f"{name}:Model") == told(
        "model.factory",
        f'"{name}:Model"',
        "Model: no layer has the parameter front.weight (and 3 more). "
        "Put it into one of the modules that pipeline_layers() returns.",
    )


NO_RESET = """
class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("numbers", torch.zeros(2, dtype=torch.long))

    def forward(self, values):
        return values

def build():
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(2, 2), nn.Sequential(Scale()))
"""


def test_a_module_on_meta_without_a_way_to_begin(write):
    name = write(NO_RESET)
    assert refusal(f"{name}:build") == told(
        "model.factory",
        f'"{name}:build"',
        "1.0 (Scale) is on meta and has no method reset_parameters() to initialize it.",
        "Write one, or build the model with real memory.",
    )


def test_a_lazy_module(write):
    name = write("def build():\n    return nn.Sequential(nn.LazyLinear(3))\n")
    assert refusal(f"{name}:build") == told(
        "model.factory", f'"{name}:build"', "0 (LazyLinear) has no shape yet.", "Give it its sizes."
    )


@pytest.mark.parametrize(
    ("plan", "lines"),
    [
        (
            "['blocks.*']",
            (
                "the model's tensor_plan is list, but must map patterns to strategies.",
                'For example {"blocks.*.up": "column"}.',
            ),
        ),
        (
            "{'blocks.*': 'colwise'}",
            (
                "the model's tensor_plan has 'colwise' for 'blocks.*'.",
                "A strategy must be column, row, vocab or replicated.",
            ),
        ),
    ],
)
def test_a_plan_of_the_models_own_that_is_none(write, plan, lines):
    name = write(f"class Model(Net):\n    tensor_plan = {plan}\n")
    assert refusal(f"{name}:Model") == told("model.factory", f'"{name}:Model"', *lines)


def test_what_is_installed_can_be_named_too():
    assert (
        load_factory("data.factory", "json.decoder:JSONDecoder") is importlib.import_module("json.decoder").JSONDecoder
    )
