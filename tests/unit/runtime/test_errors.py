"""The error tree: one root, and what a communication error carries survives every way between processes."""

from __future__ import annotations

import ast
import copy
import json
import pickle
import re

import pytest

from runtime import errors
from runtime.errors import CommunicationError, Coords, name_rank, notes_of
from tests.support.processes import ROOT

PLAIN = [
    errors.ConfigError,
    errors.LaunchError,
    errors.InvalidCall,
    errors.PeerRefused,
    errors.DataError,
    errors.BenchmarkError,
    errors.NonFiniteGradient,
]
COMMUNICATION = [errors.Mismatch, errors.PeerLost, errors.GroupClosed, errors.DeadlineExceeded]


def test_no_kind_is_missing_here():
    assert CommunicationError.kinds == {kind.__name__: kind for kind in COMMUNICATION}


@pytest.mark.parametrize("kind", [CommunicationError, *COMMUNICATION])
@pytest.mark.parametrize(
    "details",
    [{}, {"rank": 5, "coords": Coords(1, 0, 1), "step": 12, "action": "all_reduce(sum) of float32 (4,)"}],
)
@pytest.mark.parametrize(
    "travel",
    [
        lambda error: pickle.loads(pickle.dumps(error)),
        lambda error: CommunicationError.from_wire(json.loads(json.dumps(error.to_wire()))),
        copy.copy,
    ],
    ids=["pickle", "json", "copy"],
)
def test_an_error_survives_the_trip(kind, details, travel):
    arrived = travel(kind("why: ümlaut", **details))
    assert type(arrived) is kind
    assert str(arrived) == arrived.message == "why: ümlaut"
    expected = {"rank": None, "coords": None, "step": None, "action": None} | details
    assert {name: getattr(arrived, name) for name in expected} == expected
    assert arrived.coords is None or type(arrived.coords) is Coords


def test_a_kind_of_a_newer_version_becomes_the_base_class():
    fields = CommunicationError("why", rank=1).to_wire() | {"kind": "FromTheFuture"}
    assert type(CommunicationError.from_wire(fields)) is CommunicationError


def test_what_users_can_catch():
    for kind in (*PLAIN, CommunicationError):
        assert issubclass(kind, errors.Parallel3DError)
    assert issubclass(errors.InvalidCall, ValueError)
    assert issubclass(errors.NonFiniteGradient, ArithmeticError)
    assert issubclass(errors.DeadlineExceeded, TimeoutError)
    for kind in COMMUNICATION:
        others = [other for other in COMMUNICATION if other is not kind]
        assert not any(issubclass(kind, other) for other in others)


@pytest.mark.parametrize("kind", PLAIN)
def test_plain_errors_pickle(kind):
    arrived = pickle.loads(pickle.dumps(kind("why")))
    assert (type(arrived), str(arrived)) == (kind, "why")


@pytest.mark.parametrize("travel", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy], ids=["pickle", "copy"])
def test_who_has_gradients_that_are_not_finite_survives_the_trip(travel):
    arrived = travel(errors.NonFiniteGradient("why", ranks=(1, 3), step=7))
    assert (type(arrived), str(arrived)) == (errors.NonFiniteGradient, "why")
    assert (arrived.message, arrived.ranks, arrived.step) == ("why", (1, 3), 7)


def test_who_is_at_fault_where_all_ranks_raise():
    refused, not_finite = errors.PeerRefused("why", rank=2), errors.NonFiniteGradient("why", ranks=(1, 3))
    behind = ValueError()
    behind.__cause__ = not_finite
    found = [
        refused,
        pickle.loads(pickle.dumps(refused)),
        not_finite,
        behind,
        ExceptionGroup("", [ValueError(), refused]),
    ]
    assert [errors.culprit_of(each) for each in found] == [2, 2, 1, 1, 2]
    assert errors.culprit_of(errors.InvalidCall("why")) is None


def test_how_messages_name_a_rank():
    assert name_rank(5, Coords(1, 0, 1)) == "rank 5 (dp=1 tp=0 pp=1)"
    assert name_rank(5, None) == "rank 5"
    assert name_rank(None, None) == "an unknown rank"


def test_notes_are_found_and_what_is_none_is_passed_over():
    error = ValueError("no")
    assert notes_of(error) == ()
    error.add_note("Layer 3.")
    error.__notes__.append(7)
    assert notes_of(error) == ("Layer 3.",)
    error.__notes__ = "Layer 3."
    assert notes_of(error) == ()


def _defined_errors() -> dict[str, tuple[str, str]]:
    """(parent, module) by name, of every subclass of Parallel3DError in the packages."""
    classes = [
        (node.name, [base.id for base in node.bases if isinstance(base, ast.Name)], ".".join(path.parts)[: -len(".py")])
        for package in ("monitoring", "runtime", "process_groups", "parallel3d")
        for path in (each.relative_to(ROOT) for each in (ROOT / package).rglob("*.py"))
        for node in ast.walk(ast.parse((ROOT / path).read_text()))
        if isinstance(node, ast.ClassDef)
    ]
    found = {"Parallel3DError": ("", "runtime.errors")}
    while more := {
        name: (parent, module)
        for name, bases, module in classes
        for parent in bases
        if parent in found and name not in found
    }:
        found |= more
    return found


def test_the_tree_in_the_docstring_is_complete():
    drawn: dict[str, tuple[str, str]] = {"Parallel3DError": ("", "runtime.errors")}
    above = ["Parallel3DError"]
    for branch, name, text in re.findall(r"^([│ ]*[├└]── )(\w+) +(.+)$", errors.__doc__ or "", re.MULTILINE):
        depth = len(branch) // 4
        above[depth:] = [name]
        place = re.search(r"; in ([\w.]+)$", text)
        drawn[name] = above[depth - 1], place[1] if place else "runtime.errors"
    assert drawn == _defined_errors()
