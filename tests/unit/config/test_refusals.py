"""Every refusal of a key or a value, with its whole message; the cases stand in config_value_refusals.txt."""

from __future__ import annotations

import pytest

from parallel3d.config import load_config
from runtime.errors import ConfigError


def test_each_case(value_refusal, refused):
    assert refused(value_refusal.text, world_size=value_refusal.world_size) == value_refusal.error


def test_all_errors_come_at_once_from_top_to_bottom(refused):
    text = "train: {steps: 0}\nparallel: {pp: 25, dp: x}\npipline: {}\noptimizer: {lr: .inf}\n"
    overrides, environ = {"train.seed": "-1", "memory.budget": "-1"}, {"PARALLEL3D_COMM__TIMEOUT": "soon"}
    assert refused(text, overrides=overrides, environ=environ).splitlines()[::2] == [
        "run.yaml:1:16  train.steps = 0: must be at least 1.",
        "run.yaml:2:16  parallel.pp = 25: 24 layers are too few for pp(25) x virtual_stages(1) = 25 stages.",
        'run.yaml:2:24  parallel.dp = "x": must be a whole number.',
        "run.yaml:3:1  pipline: unknown key.",
        "run.yaml:4:17  optimizer.lr = .inf: must be a finite number.",
        'PARALLEL3D_COMM__TIMEOUT  comm.timeout = "soon": '
        "must be a duration: a number of seconds, or text with a unit.",
        "--set memory.budget  memory.budget = -1: must be at least 1 byte and below 8 EiB.",
        "--set train.seed  train.seed = -1: must be at least 0.",
    ]


def test_a_rule_is_silent_while_one_of_its_keys_is_wrong(refused):
    assert refused("parallel: {pp: x, dp: 3}", world_size=8).count("run.yaml") == 1
    assert refused("parallelism: {pipeline_parallel_degree: .nan, dp: 3}", world_size=8).count("run.yaml") == 1


# (overrides, environment, place, rule, remedy)
OVERRIDES = [
    (
        {"parallel.pp": "3"},
        {},
        "--set parallel.pp",
        "parallel.pp = 3: dp(1) x tp(1) x pp(3) = 3 ranks, but 8 were started.",
        "Set pp to 8, or start 3 ranks.",
    ),
    (
        {},
        {"PARALLEL3D_PARALLEL__PP": "3"},
        "PARALLEL3D_PARALLEL__PP",
        "parallel.pp = 3: dp(1) x tp(1) x pp(3) = 3 ranks, but 8 were started.",
        "Set pp to 8, or start 3 ranks.",
    ),
    (
        {},
        {},
        "defaults",
        "parallel.dp = 1: dp(1) x tp(1) x pp(1) = 1 rank, but 8 were started.",
        "Set dp to 8, or start 1 rank.",
    ),
    (
        {"parallel.dp": 8, "train.x.y": "3"},
        {},
        "--set train.x.y",
        "train.x: unknown key.",
        "Keys here: steps, batch_size, seed, precision.",
    ),
    (
        {"parallel.dp": 8},
        {"PARALLEL3D_TRAIN__STEP": "3"},
        "PARALLEL3D_TRAIN__STEP",
        "train.step: unknown key.",
        "Did you mean steps?",
    ),
    (
        {"parallel.dp": 8, "train.steps": '"4"'},
        {},
        "--set train.steps",
        'train.steps = "4": must be a whole number.',
        "Write 4 without quotes.",
    ),
    (
        {"parallel.dp": 8, "train.steps": 4, "train.steps.x": 3},
        {},
        "--set train.steps.x",
        "train.steps.x: a key cannot be set inside 4, which --set train.steps gives.",
        "Set the whole value instead.",
    ),
    (
        {"parallel.dp": 8, "train.seed": object},
        {},
        "--set train.seed",
        "train.seed = a type: not a plain value.",
        "Give None, a bool, a number, text, a list or a dict with text keys.",
    ),
    (
        {"parallel.dp": 8, "data.path": "\udc80"},
        {},
        "--set data.path",
        'data.path = "\\udc80": not UTF-8 text.',
        "Give it in UTF-8.",
    ),
    (
        {"parallel.dp": 8, "data.path": "[1"},
        {},
        "--set data.path",
        "data.path: not valid YAML: while parsing a flow sequence: did not find expected ',' or ']'.",
        "Check indentation, brackets and quotes near here.",
    ),
    (
        {"parallel.dp": 8, "data.path": "{a: !!python/name:os.system }"},
        {},
        "--set data.path",
        "data.path.a: the tag !!python/name:os.system is not accepted.",
        "Remove the tag; a plain value is enough.",
    ),
    (
        {"parallel.dp": 8, "parallel.data_parallel_size": 8},
        {},
        "--set parallel.data_parallel_size",
        ("parallel.data_parallel_size: the same key as parallel.dp, which is given at --set parallel.dp."),
        "Keep one of the two.",
    ),
    (
        {"parallel.dp": 8, "a" + ".a" * 99: 8},
        {},
        "--set a" + ".a" * 99,
        "unknown key.",
        "No key has that many levels.",
    ),
]


@pytest.mark.parametrize(("overrides", "environ", "place", "rule", "remedy"), OVERRIDES)
def test_an_override_is_named_as_the_place(overrides, environ, place, rule, remedy):
    with pytest.raises(ConfigError) as error:
        load_config(None, overrides=overrides, environ=environ, world_size=8)
    assert str(error.value) == f"{place}  {rule}\n{' ' * len(place)}  {remedy}"


@pytest.mark.parametrize(
    ("overrides", "environ", "place"),
    [
        ({"parallel.pp": "4"}, {}, "--set parallel.pp"),
        ({"parallel": {"pp": 4}}, {}, "--set parallel"),
        ({}, {"PARALLEL3D_PARALLEL__PP": "4"}, "PARALLEL3D_PARALLEL__PP"),
    ],
)
def test_what_was_set_is_blamed_before_the_file(refused, overrides, environ, place):
    error = refused("parallel: {dp: 2, tp: 2, pp: 2}", world_size=8, overrides=overrides, environ=environ)
    assert error == (
        f"{place}  parallel.pp = 4: dp(2) x tp(2) x pp(4) = 16 ranks, but 8 were started.\n"
        f"{' ' * len(place)}  Set dp to 1, or start 16 ranks."
    )


def test_an_override_inside_a_list_of_the_file(refused):
    text, overrides = "pipeline: {layers_per_stage: [24]}", {"pipeline.layers_per_stage.0": "3"}
    assert refused(text, overrides=overrides) == (
        "--set pipeline.layers_per_stage.0  pipeline.layers_per_stage.0: "
        "a key cannot be set inside [24], which run.yaml:1:30 gives.\n"
        "                                   Set the whole value instead."
    )
