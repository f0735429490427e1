"""A state as JSON and tensors: what goes in comes out, and what can't travel is named."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn

from parallel3d.gradient_worker.state import SyncedState
from parallel3d.gradient_worker.state_tree import flatten, unflatten
from runtime.errors import InvalidCall, Mismatch


def travelled(state):
    text, tensors = flatten(state)
    return unflatten(text, [each.reshape(-1) for each in tensors])


def test_nested_values():
    state = {"a": [1, 2.5, None, True, "ü"], 7: ((), {}, (1,)), "inf": -math.inf, "big": 2**70}
    assert travelled(state) == state
    assert isinstance(travelled(state)[7], tuple)


def test_tensors_of_every_dtype_and_shape():
    state = {
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 4),
        "flag": torch.tensor([True, False]),
        "half": torch.tensor([[1.5, 2.5]], dtype=torch.bfloat16),
        "turned": torch.arange(6.0).view(2, 3).t(),
    }
    for name, each in travelled(state).items():
        assert each.dtype is state[name].dtype
        assert torch.equal(each, state[name])


def test_a_tied_weight_travels_once():
    weight = torch.ones(3)
    found = flatten([weight, weight.detach(), torch.ones(3), weight[:2]])
    assert len(found.tensors) == 3


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"a": [object()]}, r"state\.a\[0\] is a object"),
        ({"a": torch.eye(2).to_sparse()}, "only dense ones travel"),
    ],
)
def test_what_can_not_travel(state, words):
    with pytest.raises(InvalidCall, match=words):
        flatten(state)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\xff",
        b'{"tensor": 1, "shape": [3]}',
        b'{"tensor": -1, "shape": [3]}',
        b'{"tensor": 0, "shape": [4]}',
        b'{"tensor": 0, "shape": ["3"]}',
        b'{"tensor": 0}',
        b'{"dict": [[1]]}',
        b'{"dict": [[{"list": []}, 1]]}',
        b'{"other": 1}',
        b"[1]",
        json.dumps({"list": []}).encode() * 2,
        b'{"list": [' * 5000,
    ],
)
def test_what_can_not_be_read(text):
    with pytest.raises(Mismatch, match="a state came that can't be read"):
        unflatten(text, [torch.zeros(3)])


def trained(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(seed):
        model(torch.randn(8, 3)).sum().backward()
        optimizer.step()
        scheduler.step()
    return model, optimizer, scheduler


def test_a_model_with_its_optimizer_and_scheduler():
    """Also where the other one's optimizer has nothing to remember yet."""
    theirs, mine = trained(3), trained(0)
    names = ("model", "optimizer", "extra")
    SyncedState(dict(zip(names, mine, strict=True))).load(3, SyncedState(dict(zip(names, theirs, strict=True))).save())
    for their, my in zip(theirs, mine, strict=True):
        assert flatten(their.state_dict()).text == flatten(my.state_dict()).text
        pairs = zip(flatten(their.state_dict()).tensors, flatten(my.state_dict()).tensors, strict=True)
        assert all(torch.equal(*pair) for pair in pairs)


def test_another_model_does_not_fit():
    with pytest.raises(Mismatch, match=r"another worker's model does not fit this one's: (.|\n)*size mismatch"):
        SyncedState({"model": nn.Linear(2, 2)}).load(0, SyncedState({"model": nn.Linear(3, 2)}).save())
    with pytest.raises(Mismatch, match=r"another worker's state has \[\], this one's \['model'\]"):
        SyncedState({"model": nn.Linear(2, 2)}).load(0, SyncedState({}).save())
    with pytest.raises(Mismatch, match="it does not begin with its description"):
        SyncedState({}).load(0, [])
