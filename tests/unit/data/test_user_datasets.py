"""A dataset of the user's own: what is stacked how, and what each way of being wrong is told as."""

from __future__ import annotations

import random
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from parallel3d.config import load_config
from parallel3d.data import Batch, Dataset, make_dataset
from parallel3d.data.batch import collate
from runtime.errors import ConfigError, DataError

NAME = "users_data_3d"


@pytest.fixture
def module(here, monkeypatch):
    """Writes the user's module, which is importable from the current folder."""
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])

    def write(source: str) -> None:
        (here / f"{NAME}.py").write_text(source)

    yield write
    sys.modules.pop(NAME, None)


@pytest.fixture
def factory(monkeypatch):
    """A module of the user's that is there already, with this function in it."""

    def put(function: Callable[[], Any]) -> str:
        module = types.ModuleType(NAME)
        module.build = function  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, NAME, module)
        monkeypatch.setattr("parallel3d.config.factories.missing_module", lambda _: None)
        monkeypatch.setattr("parallel3d.config.model_rules.missing_module", lambda _: None)
        return f"{NAME}:build"

    return put


def make(name: str = f"{NAME}:build", **overrides: Any) -> Dataset:
    return make_dataset(load_config(None, overrides={"data.factory": name, **overrides}, environ={}))


def refused(name: str = f"{NAME}:build", **overrides: Any) -> str:
    with pytest.raises(ConfigError) as error:
        make(name, **overrides)
    return str(error.value)


def test_a_factory_in_the_current_folder(module):
    module("def build():\n    return [([i, i + 0.5], i % 2) for i in range(6)]\n")
    data = make()
    assert len(data) == 6
    assert str(data) == f"6 samples of {NAME}:build"
    inputs, targets = data.batch([4, 1])
    assert isinstance(inputs, tuple)
    assert [part.tolist() for part in inputs] == [[4, 1], [4.5, 1.5]]
    assert targets.tolist() == [0, 1]
    assert data[3] == ([3, 3.5], 1)


def test_a_factory_may_be_inside_a_class(module):
    module("class Data:\n    @staticmethod\n    def build():\n        return [(1.0, 2.0)]\n")
    assert make(f"{NAME}:Data.build").batch([0]).targets.tolist() == [2.0]


CASES = [
    ("1/0", f"{NAME} cannot be imported: ZeroDivisionError: division by zero ({NAME}.py:1)."),
    ("exit('no')", f"{NAME} cannot be imported: SystemExit: no ("),
    ("def (", f"{NAME} cannot be imported: SyntaxError: "),
    ("import nowhere_3d", f"{NAME} cannot be imported: ModuleNotFoundError: No module named 'nowhere_3d'"),
    ("def built(): ...", f"{NAME} has no build.\nDid you mean built?"),
    ("x = 3", f"{NAME} has no build.\nCheck the name after the colon."),
    ("build = {}", "build is a value of type dict, which cannot be called.\nName a function or a class."),
    (
        "def build(x): ...",
        "it was called with no arguments, and raised TypeError: build() missing 1 required positional argument: 'x'",
    ),
    (
        "def build():\n    raise OSError('no disk')",
        f"it was called with no arguments, and raised OSError: no disk ({NAME}.py:2).\nMend it, or name another.",
    ),
    ("def build(): return 5", "it returned a value of type int, which has no len(d) or no d[i]."),
    ("def build(): return (x for x in 'ab')", "it returned a value of type generator, which has no len(d) or no d[i]."),
    ("def build(): return []", "the dataset has no samples.\nReturn one that has some."),
    (
        "class build:\n    def __len__(self): return -1\n    def __getitem__(self, i): ...",
        "the dataset's len raised ValueError: __len__() should return >= 0",
    ),
    ("def build(): return [5, 6]", "sample 0: a sample must be (input, target), not a value of type int."),
    ("def build(): return [(1, 2, 3)]", "sample 0: a sample must be (input, target), not a tuple of 3."),
    ("def build(): return [('a', 2)]", "sample 0: inputs must be tensors, arrays or numbers, not a value of type str."),
    ("def build(): return [({}, 2)]", "sample 0: inputs must be tensors, arrays or numbers, not a value of type dict."),
    ("def build(): return [((), 2)]", "sample 0: inputs must be tuples of the same length."),
    (
        "def build(): return [(1, (2, 3))]",
        "sample 0: targets must be tensors, arrays or numbers, not a tuple of 2.",
    ),
    ("def build(): return {1: 2}", "sample 0 raised KeyError: 0"),
    ("def build(): return [(1, 2)]", "len(d) is 1, and one step takes 2 samples.\nMake it longer, or set "),
]


@pytest.mark.parametrize(("source", "message"), CASES, ids=[case[0][:30] for case in CASES])
def test_a_factory_that_is_wrong(source, message, module):
    module(source + "\n")
    error = refused(**{"train.batch_size": 2})
    assert error.startswith(f'data.factory = "{NAME}:build": {message}')


def test_the_cause_is_kept(factory):
    def build():
        raise OSError("no disk")

    with pytest.raises(ConfigError) as error:
        make(factory(build))
    assert isinstance(error.value.__cause__, OSError)


def test_an_error_in_a_sample_names_it_and_keeps_the_cause(factory):
    class Data:
        def __len__(self):
            return 9

        def __getitem__(self, index):
            if index == 7:
                raise ValueError("rotten")
            return 1.0, 2.0

    data = make(factory(Data))
    with pytest.raises(
        DataError, match=r"data.factory = users_data_3d:build: sample 7 raised ValueError: rotten \("
    ) as error:
        data.batch([1, 7])
    assert isinstance(error.value.__cause__, ValueError)


def test_samples_that_do_not_fit_each_other(factory):
    data = make(factory(lambda: [(torch.zeros(2 + index // 2), 0) for index in range(4)]))
    assert data.batch([2, 3]).inputs.shape == (2, 3)
    with pytest.raises(DataError, match=r"build: samples 1, 2: inputs differ: float32 \(2,\) and float32 \(3,\)\.$"):
        data.batch([1, 2])


def test_a_factory_draws_the_same_on_every_rank(factory):
    def build():
        return [(torch.randn(2), random.random() + np.random.rand())]

    name, before = factory(build), (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())
    first, second = (make(name, **{"train.seed": 2**40 + 1}).batch([0]) for _ in range(2))
    assert torch.equal(first.inputs, second.inputs)
    assert torch.equal(first.targets, second.targets)
    assert not torch.equal(first.inputs, make(name).batch([0]).inputs)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]


STACKED = [
    ([(torch.ones(2), torch.tensor(3)), (torch.zeros(2), torch.tensor(4))], [[1, 1], [0, 0]], [3, 4], torch.float32),
    ([(np.ones(2), np.int32(3)), (np.zeros(2), np.int32(4))], [[1, 1], [0, 0]], [3, 4], torch.float64),
    ([[1, 2], [3, 4]], [1, 3], [2, 4], torch.int64),
    ([(1.5, True), (2.5, False)], [1.5, 2.5], [True, False], torch.float32),
    ([(np.float32(1.5), 1), (np.float32(2.5), 2)], [1.5, 2.5], [1, 2], torch.float32),
]


@pytest.mark.parametrize(("samples", "inputs", "targets", "dtype"), STACKED)
def test_samples_are_stacked(samples, inputs, targets, dtype):
    batch = collate(samples)
    assert isinstance(batch, Batch)
    assert isinstance(batch.inputs, torch.Tensor)
    assert (batch.inputs.tolist(), batch.inputs.dtype, batch.targets.tolist()) == (inputs, dtype, targets)


def test_arrays_that_cannot_be_written_to_are_no_trouble():
    array = np.frombuffer(b"abcd", np.uint8)
    assert collate([(array, 1)]).inputs.tolist() == [[97, 98, 99, 100]]


def test_tuples_of_inputs_are_stacked_one_by_one():
    inputs, targets = collate([((torch.ones(2), 1), 5), ((torch.zeros(2), 2), 6)])
    assert [part.tolist() for part in inputs] == [[[1, 1], [0, 0]], [1, 2]]
    assert targets.tolist() == [5, 6]


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([(1, 2), (1.0, 2)], "inputs differ: float and int"),
        ([(1, 2), (torch.ones(1), 2)], r"inputs differ: float32 \(1,\) and int"),
        ([(np.ones(1), 2), (np.ones(2), 2)], r"inputs differ: float64 array \(1,\) and float64 array \(2,\)"),
        ([((1, 2), 2), ((1,), 2)], "inputs must be tuples of the same length"),
        ([((1, 2), 2), (1, 2)], "inputs must be tuples of the same length"),
        ([(1, 2), ((1, 2), 2)], "inputs differ: int and tuple"),
        ([(1, None)], "targets must be tensors, arrays or numbers, not a value of type NoneType"),
    ],
)
def test_samples_that_cannot_be_stacked(samples, message):
    with pytest.raises((TypeError, ValueError), match=message):
        collate(samples)


@pytest.mark.parametrize("sample", [(10**30, 1), (np.array(["a"]), 1), (np.array([None]), 1)])
def test_what_torch_cannot_hold(sample, factory):
    assert "sample 0: " in refused(factory(lambda: [sample]))
