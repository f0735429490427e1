"""Whatever the text, the answer is a config or a ConfigError, and it comes soon."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from parallel3d.config import RunConfig, load_config
from parallel3d.config.aliases import ALIASES, SECTION_ALIASES
from parallel3d.config.sections import ARGS
from parallel3d.config.yaml_scalars import dump, resolve_scalar
from runtime.errors import ConfigError

QUICK = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
KEYS = sorted(
    {
        *RunConfig.model_fields,
        *SECTION_ALIASES,
        *(key for args in ARGS.values() for key in args.model_fields),
        *(name.rpartition(".")[2] for name in ALIASES),
    }
    | {key for field in RunConfig().model_dump().values() for key in field}
)
WORDS = [
    "auto",
    "gpt",
    "llama",
    "hf",
    "column",
    "cosine",
    "zbv",
    "1F1B",
    "interleaved",
    "8 GiB",
    "2min",
    "dp-tp-pp",
    "os:walk",
    "no.such:thing",
]
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(WORDS)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=4), inner, max_size=5)
    ),
    max_leaves=20,
)
YAML_TEXT = st.text(
    st.sampled_from(list("ab:-[]{}&*!|>'\"#%@`,? \n\t0.<~e")) | st.characters(codec="utf-8"), max_size=200
)


def loads_or_refuses(path: Path, **options: Any) -> None:
    start = time.process_time()
    try:
        config = load_config(path, environ={}, **options)
    except ConfigError as error:
        text = str(error)
        assert text
        assert "pydantic" not in text
        assert "Input should" not in text
    else:
        path.write_text(config.to_yaml(), encoding="utf-8")
        assert load_config(path, environ={}) == config
    assert time.process_time() - start < 1.0


@QUICK
@given(data=st.binary(max_size=200) | YAML_TEXT.map(str.encode))
def test_any_bytes(data, tmp_path):
    (tmp_path / "run.yaml").write_bytes(data)
    loads_or_refuses(tmp_path / "run.yaml")


@QUICK
@given(
    values=st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=6),
    world_size=st.none() | st.integers(1, 64),
)
def test_any_values_under_known_keys(values, world_size, tmp_path):
    (tmp_path / "run.yaml").write_text(dump(values), encoding="utf-8")
    loads_or_refuses(tmp_path / "run.yaml", world_size=world_size)


@QUICK
@given(
    overrides=st.dictionaries(st.lists(st.sampled_from(KEYS), min_size=1, max_size=3).map(".".join), VALUES, max_size=4)
)
def test_any_overrides(overrides, tmp_path):
    (tmp_path / "run.yaml").touch()
    loads_or_refuses(tmp_path / "run.yaml", overrides=overrides)


@QUICK
@given(args=st.dictionaries(st.text(st.characters(codec="utf-8")), VALUES, max_size=4))
def test_keywords_of_a_users_model_survive_the_way_through_yaml(args, tmp_path):
    (tmp_path / "run.yaml").touch()
    loads_or_refuses(tmp_path / "run.yaml", overrides={"model.factory": "os:walk", "model.args": args})


@QUICK
@given(plan=st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=8), st.sampled_from(["row", "vocab"])))
def test_any_tensor_plan(plan, tmp_path):
    (tmp_path / "run.yaml").touch()
    loads_or_refuses(tmp_path / "run.yaml", overrides={"parallel.tensor_plan": plan})


@QUICK
@given(text=st.text(st.sampled_from("0123456789+-.eExoinfa_:"), max_size=70))
def test_any_word_resolves(text):
    value = resolve_scalar(text)
    assert value is None or type(value) in (bool, int, float, str)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "a: " * 50_000, "- " * 50_000, "{a: " * 50_000, "? " * 50_000, "&a " * 50_000]
)
def test_large_nonsense_is_refused_soon(text, tmp_path):
    (tmp_path / "run.yaml").write_text(text)
    loads_or_refuses(tmp_path / "run.yaml")
