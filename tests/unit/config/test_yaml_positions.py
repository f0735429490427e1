"""Every refusal of the file itself, with its whole message; most cases stand in config_yaml_refusals.txt."""

from __future__ import annotations

import time

import pytest

from parallel3d.config import load_config
from parallel3d.config.yaml_positions import LARGEST_FILE
from runtime.errors import ConfigError

CHECK = "Check indentation, brackets and quotes near here."
UNPRINTABLE = [
    (
        "train:\n\tsteps: 1",
        "run.yaml:2:1  not valid YAML: while scanning for the next token: "
        f"found character that cannot start any token.\n              {CHECK}",
    ),
    (
        "train:\n  seed: \x07",
        "run.yaml:2:9  the character U+0007 is not allowed in YAML.\n              Remove it.",
    ),
    (
        "parallel: {dp: 1\n",
        "run.yaml:2:1  not valid YAML: while parsing a flow mapping: "
        f"did not find expected ',' or '}}'.\n              {CHECK}",
    ),
]


def test_each_case(yaml_refusal, refused, here):
    assert refused(yaml_refusal.text) == yaml_refusal.error
    assert [entry.name for entry in here.iterdir()] == ["run.yaml"]


@pytest.mark.parametrize(("text", "expected"), UNPRINTABLE)
def test_what_a_list_of_cases_cannot_hold(text, expected, refused):
    assert refused(text) == expected


def test_an_alias_bomb_is_refused_at_once(refused):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    start = time.process_time()
    assert refused("\n".join(lines)) == (
        "run.yaml:4:45  a3[7]: aliases stand for more than 10000 values.\n"
        "               Write the values out instead of using aliases."
    )
    assert time.process_time() - start < 1.0


def refusal_of(path: str) -> str:
    with pytest.raises(ConfigError) as error:
        load_config(path, environ={})
    return str(error.value)


def test_a_file_over_1_mib(here):
    (here / "run.yaml").write_bytes(b"#" * (LARGEST_FILE + 1))
    assert refusal_of("run.yaml") == (
        "run.yaml  is larger than 1 MiB.\n          A run's configuration is a page or two; check the path."
    )
    (here / "run.yaml").write_bytes(b"#" * LARGEST_FILE)
    assert load_config("run.yaml", environ={}) == load_config(None, environ={})


def test_a_missing_file(here):
    assert refusal_of("run.yaml") == "run.yaml  file not found.\n          Check the path."
    (here / "runs.yaml").touch()
    assert refusal_of("run.yaml") == "run.yaml  file not found.\n          Did you mean runs.yaml?"
    assert refusal_of("no/run.yaml") == "no/run.yaml  file not found.\n             Check the path."


def test_a_folder(here):
    (here / "run.yaml").mkdir()
    assert refusal_of("run.yaml") == "run.yaml  is a folder, not a file.\n          Give the path of a YAML file."


def test_a_path_through_a_file(here):
    (here / "run.yaml").touch()
    assert refusal_of("run.yaml/x") == (
        "run.yaml/x  cannot be read: Not a directory.\n            Check the path and its permissions."
    )


def test_a_path_with_a_null_character(here):
    assert refusal_of("a\0b") == ("a\0b  cannot be read: embedded null byte.\n     Check the path and its permissions.")


def test_a_file_that_is_not_utf_8(here):
    (here / "run.yaml").write_bytes(b"train:\n  steps: \xff\n")
    assert refusal_of("run.yaml") == (
        "run.yaml  is not UTF-8 text (byte 0xff on line 2).\n          Save the file as UTF-8."
    )


def test_a_byte_order_mark_is_no_problem(here):
    (here / "run.yaml").write_bytes("train: {steps: 7}".encode("utf-8-sig"))
    assert load_config("run.yaml", environ={}).train.steps == 7


@pytest.mark.parametrize("key", ["'<<'", '"<<"', "!!str <<"])
def test_a_merge_key_in_quotes_is_text(here, key):
    (here / "run.yaml").write_text(f"model: {{factory: 'os:walk', args: {{{key}: {{a: 1}}}}}}")
    config = load_config("run.yaml", environ={})
    assert config.model.args == {"<<": {"a": 1}}
    (here / "again.yaml").write_text(config.to_yaml())
    assert load_config("again.yaml", environ={}) == config


def test_a_refused_value_is_complained_about_once(refused):
    assert refused("parallel: {dp: !x 2, order: [[0, 0, !y 0]]}", world_size=2).count("run.yaml") == 2


FLOODS = [
    ("".join(f"k{n}: 1\n" for n in range(2000)), "k999: unknown key."),
    (
        "model: {factory: 'os:walk', args: {a: [" + ".nan, " * 2000 + "]}}",
        "model.args.a[999] = .nan: must be",
    ),
    ("a: 1\n" * 2000, "a: given twice, first at run.yaml:1:1."),
]


@pytest.mark.parametrize(("text", "last"), FLOODS)
def test_a_flood_of_problems_is_cut(text, last, refused):
    *_, shown, _, cut, remedy = refused(text).splitlines()
    assert last in shown
    assert (cut, remedy) == ("run.yaml  more than 1000 problems.", "          The others are not shown.")
