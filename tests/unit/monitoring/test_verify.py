"""`parallel3d verify`: every outcome of every gate, the thresholds' ranges, and the exit codes."""

from __future__ import annotations

import json
import math
import sys
from copy import deepcopy
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monitoring.verify import Metrics, Outcome, Thresholds, notes, verify
from parallel3d.cli.main import main
from tests.support.processes import ROOT

ONE = {
    "world_size": 1,
    "tokens_per_sec": 1000.0,
    "final_loss": 1.0,
    "ddp_metrics": {"allreduce_bandwidth_gbps": []},
}
FOUR = {
    "world_size": 4,
    "tokens_per_sec": 3600.0,
    "final_loss": 1.005,
    "ddp_metrics": {"allreduce_bandwidth_gbps": [2.0, 1.5, 3.0]},
}
GATES = ("scaling_efficiency", "loss", "allreduce_bandwidth")
ABSENT = object()


class Case(NamedTuple):
    gate: str
    outcome: str
    says: str
    """A piece of the message."""
    field: str = ""
    value: Any = ABSENT
    file: str = "many.json"
    world_size: int = 4
    thresholds: dict[str, float] = {}  # noqa: RUF012
    """Of a case that only reads it."""


SCALING = [
    Case("scaling_efficiency", "ok", "0.9 >= 0.85: 3,600 tokens/s on 4 ranks, 1,000 on one", "tokens_per_sec", 3600.0),
    Case("scaling_efficiency", "ok", "0.85 >= 0.85", "tokens_per_sec", 3400),
    Case("scaling_efficiency", "ok", "1.25 >= 0.85", "tokens_per_sec", 5000),
    Case("scaling_efficiency", "below_threshold", "0.825 < 0.85: 3,300 tokens/s", "tokens_per_sec", 3300),
    Case("scaling_efficiency", "below_threshold", "0.849999 < 0.85", "tokens_per_sec", 3399.996),
    Case(
        "scaling_efficiency",
        "below_threshold",
        "0.9 < 0.95",
        "tokens_per_sec",
        3600,
        thresholds={"scaling_floor": 0.95},
    ),
    Case("scaling_efficiency", "below_threshold", "0.72 < 0.85", "tokens_per_sec", 3600, world_size=5),
    Case("scaling_efficiency", "missing_field", "many.json: there is no tokens_per_sec", "tokens_per_sec"),
    Case(
        "scaling_efficiency", "missing_field", "one.json: there is no tokens_per_sec", "tokens_per_sec", file="one.json"
    ),
    Case("scaling_efficiency", "non_positive", "many.json: tokens_per_sec is 0,", "tokens_per_sec", 0),
    Case("scaling_efficiency", "non_positive", "one.json: tokens_per_sec is -3.5,", "tokens_per_sec", -3.5, "one.json"),
    Case("scaling_efficiency", "not_a_number", 'tokens_per_sec is "fast", not a number', "tokens_per_sec", "fast"),
    Case("scaling_efficiency", "not_a_number", "tokens_per_sec is NaN", "tokens_per_sec", math.nan),
    Case("scaling_efficiency", "not_a_number", "tokens_per_sec is Infinity", "tokens_per_sec", math.inf),
    Case("scaling_efficiency", "not_a_number", "tokens_per_sec is true", "tokens_per_sec", True),
    Case("scaling_efficiency", "not_a_number", "tokens_per_sec is 1000", "tokens_per_sec", 10**400),
    Case("scaling_efficiency", "not_a_number", "tokens_per_sec is null", "tokens_per_sec", None, "one.json"),
    Case("scaling_efficiency", "world_size_too_small", "--world-size 1", world_size=1),
    Case("scaling_efficiency", "world_size_too_small", "--world-size -2", world_size=-2),
]
LOSS = [
    Case("loss", "ok", "0.005 <= 0.01: final loss 1.005, 1 on one rank", "final_loss", 1.005),
    Case("loss", "ok", "0.01 <= 0.01", "final_loss", 1.01),  # 0.01 and something in floating point
    Case("loss", "ok", "0.01 <= 0.01", "final_loss", 0.99),
    Case("loss", "ok", "0 <= 0", "final_loss", 1, thresholds={"loss_tolerance": 0}),
    Case("loss", "above_threshold", "0.02 > 0.01: final loss 1.02, 1 on one rank", "final_loss", 1.02),
    Case("loss", "above_threshold", "0.02 > 0.01: final loss 0.98", "final_loss", 0.98),
    Case("loss", "above_threshold", "0.01000001 > 0.01", "final_loss", 1.01000001),
    Case("loss", "missing_field", "many.json: there is no final_loss", "final_loss"),
    Case("loss", "missing_field", "one.json: there is no final_loss", "final_loss", file="one.json"),
    Case("loss", "non_positive", "one.json: final_loss is 0.0,", "final_loss", 0.0, "one.json"),
    Case("loss", "non_positive", "many.json: final_loss is -1,", "final_loss", -1),
    Case("loss", "not_a_number", "many.json: final_loss is null", "final_loss", None),  # as a run writes NaN
    Case("loss", "not_a_number", "final_loss is NaN", "final_loss", math.nan),
    Case("loss", "not_a_number", "final_loss is [1.0]", "final_loss", [1.0]),
]
BANDWIDTHS = "ddp_metrics.allreduce_bandwidth_gbps"


def rates(*values: Any) -> dict[str, Any]:
    return {"field": "ddp_metrics", "value": {"allreduce_bandwidth_gbps": list(values)}}


BANDWIDTH = [
    Case("allreduce_bandwidth", "ok", "all 3 > 0 GB/s; the least is 1.5 at index 1"),
    Case("allreduce_bandwidth", "ok", "all 3 >= 1.5 GB/s", thresholds={"peak_gbps": 3}),
    Case(
        "allreduce_bandwidth",
        "below_threshold",
        "1.5 < 1.75 GB/s, half of the peak of 3.5, at index 1; 1 of 3",
        thresholds={"peak_gbps": 3.5},
    ),
    Case("allreduce_bandwidth", "below_threshold", "2 < 50 GB/s, half of", thresholds={"peak_gbps": 100}),
    Case("allreduce_bandwidth", "missing_field", f"many.json: there is no {BANDWIDTHS}", "ddp_metrics"),
    Case("allreduce_bandwidth", "missing_field", f"there is no {BANDWIDTHS}", "ddp_metrics", {}),
    Case("allreduce_bandwidth", "missing_field", f"there is no {BANDWIDTHS}", "ddp_metrics", [1.0]),
    Case("allreduce_bandwidth", "empty_array", f"{BANDWIDTHS} is empty", **rates()),
    Case("allreduce_bandwidth", "non_positive", f"{BANDWIDTHS}[1] is 0,", **rates(1, 0, -1)),
    Case("allreduce_bandwidth", "non_positive", f"{BANDWIDTHS}[2] is -0.5,", **rates(1, 2, -0.5)),
    Case("allreduce_bandwidth", "not_a_number", f"{BANDWIDTHS}[0] is NaN", **rates(math.nan)),
    Case("allreduce_bandwidth", "not_a_number", f'{BANDWIDTHS}[1] is "1"', **rates(1, "1")),
    Case(
        "allreduce_bandwidth",
        "not_a_number",
        f"{BANDWIDTHS} is 3.5, not an array",
        "ddp_metrics",
        {"allreduce_bandwidth_gbps": 3.5},
    ),
]
CASES = [*SCALING, *LOSS, *BANDWIDTH]


def files_of(case: Case) -> dict[str, dict[str, Any]]:
    files = {"one.json": deepcopy(ONE), "many.json": deepcopy(FOUR)}
    if case.field and case.value is ABSENT:
        del files[case.file][case.field]
    elif case.field:
        files[case.file][case.field] = case.value
    return files


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.gate}-{case.outcome}-{case.says[:30]}")
def test_each_gate_names_its_outcome(case):
    files = files_of(case)
    one, many = (Metrics(name, content) for name, content in files.items())
    judgements = verify(one, many, case.world_size, Thresholds(**case.thresholds))
    assert [each.gate for each in judgements] == list(GATES)
    found = judgements[GATES.index(case.gate)]
    assert (found.outcome, case.says in found.message) == (case.outcome, True), found.message
    assert found.accepts == (case.outcome == "ok")
    others = [each.outcome for each in judgements if each is not found]
    assert others == [Outcome.OK] * 2, "one value decides one gate alone"


def test_every_outcome_is_in_the_table():
    assert {case.outcome for case in CASES} == set(Outcome)


def test_the_evidence_has_all_numbers():
    scaling, loss, bandwidth = verify(Metrics("a", ONE), Metrics("b", FOUR), 4)
    assert scaling.evidence == {
        "efficiency": 0.9,
        "scaling_floor": 0.85,
        "world_size": 4,
        "baseline_tokens_per_sec": 1000.0,
        "candidate_tokens_per_sec": 3600.0,
    }
    assert loss.evidence == {
        "relative_difference": 0.005,
        "loss_tolerance": 0.01,
        "baseline_final_loss": 1.0,
        "candidate_final_loss": 1.005,
    }
    assert (bandwidth.evidence["index"], bandwidth.evidence["gbps"]) == (1, 1.5)


def test_where_the_first_bad_value_stands():
    many = FOUR | {"ddp_metrics": {"allreduce_bandwidth_gbps": [1.0, 0, math.nan]}}
    assert verify(Metrics("a", ONE), Metrics("b", many), 4)[2].evidence == {
        "file": "b", "field": "ddp_metrics.allreduce_bandwidth_gbps[1]", "index": 1, "found": "0",
    }  # fmt: skip


def test_files_of_another_number_of_ranks_are_doubted():
    assert notes(Metrics("a", ONE), Metrics("b", FOUR), 4) == []
    found = notes(Metrics("a", FOUR), Metrics("b", FOUR), 8)
    assert found == [
        "a: world_size is 4, not 1: the baseline is the run on one rank.",
        "b: world_size is 4, not 8: --world-size says otherwise.",
    ]
    assert notes(Metrics("a", {}), Metrics("b", {"world_size": "4"}), 8) == []


SCALAR = st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["", "1", "x"])
ANY_JSON = SCALAR | st.lists(SCALAR, max_size=3) | st.fixed_dictionaries({"x": SCALAR})
RATES = st.fixed_dictionaries({"allreduce_bandwidth_gbps": st.lists(SCALAR, max_size=3)})
FIELDS = {"tokens_per_sec": ANY_JSON, "final_loss": ANY_JSON, "world_size": ANY_JSON, "ddp_metrics": ANY_JSON | RATES}
ANY_METRICS = st.fixed_dictionaries({}, optional=FIELDS)


@given(ANY_METRICS, ANY_METRICS, st.integers())
def test_whatever_files_say_is_judged_and_can_be_told(one, many, world_size):
    judgements = verify(Metrics("a", one), Metrics("b", many), world_size)
    assert json.loads(json.dumps([each.to_json() for each in judgements], allow_nan=False))


@given(st.floats(1e-300, 1e300), st.floats(1e-300, 1e300), st.integers(2, 10**6))
def test_numbers_of_any_size_are_compared(one, many, world_size):
    found = verify(
        Metrics("a", ONE | {"tokens_per_sec": one}), Metrics("b", FOUR | {"tokens_per_sec": many}), world_size
    )
    assert found[0].accepts == (found[0].evidence["efficiency"] >= 0.85) or found[0].evidence["efficiency"] == 0.85


# The verb.


class Exit(NamedTuple):
    code: int
    stdout: str
    stderr: str


@pytest.fixture
def run_verify(monkeypatch, capsys, here):
    """Runs the command in this process."""
    (here / "one.json").write_text(json.dumps(ONE))
    (here / "many.json").write_text(json.dumps(FOUR))

    def run(*words: str) -> Exit:
        files = ["--baseline", "one.json", "--candidate", "many.json", "--world-size", "4"]
        monkeypatch.setattr(sys, "argv", ["parallel3d", "verify", *files, *words])
        with pytest.raises(SystemExit) as exit:
            main()
        return Exit(exit.value.code or 0, *capsys.readouterr())

    return run


def test_all_accept(run_verify):
    assert run_verify() == (
        0,
        "scaling_efficiency   ok  0.9 >= 0.85: 3,600 tokens/s on 4 ranks, 1,000 on one\n"
        "loss                 ok  0.005 <= 0.01: final loss 1.005, 1 on one rank\n"
        "allreduce_bandwidth  ok  all 3 > 0 GB/s; the least is 1.5 at index 1\n"
        "accepted\n",
        "",
    )


def test_the_documentations_example_is_real(run_verify, here):
    rates = {"allreduce_bandwidth_gbps": [3.25, *[4.0] * 59]}
    (here / "one.json").write_text(json.dumps(ONE | {"tokens_per_sec": 8000, "final_loss": 2.5}))
    (here / "many.json").write_text(
        json.dumps(FOUR | {"tokens_per_sec": 26000, "final_loss": 2.501, "ddp_metrics": rates})
    )
    assert f"```\n{run_verify().stdout}```" in (ROOT / "docs" / "reports.md").read_text()


def test_all_gates_are_shown_when_one_rejects(run_verify):
    done = run_verify("--scaling-floor", "0.95", "--peak-gbps", "10")
    assert (done.code, len(done.stdout.splitlines())) == (5, 4)
    assert "scaling_efficiency   below_threshold  0.9 < 0.95" in done.stdout
    assert "loss                 ok" in done.stdout
    assert done.stdout.splitlines()[-1] == "rejected by scaling_efficiency, allreduce_bandwidth"


def test_the_world_size_is_a_gates_matter(run_verify):
    done = run_verify("--world-size", "1")
    assert done.code == 5
    assert "world_size_too_small" in done.stdout
    assert "many.json: world_size is 4, not 1" in done.stderr


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--scaling-floor", "0"),
        ("--scaling-floor", "1.01"),
        ("--scaling-floor", "-0.5"),
        ("--scaling-floor", "nan"),
        ("--loss-tolerance", "-0.01"),
        ("--loss-tolerance", "1.5"),
        ("--loss-tolerance", "nan"),
        ("--peak-gbps", "0"),
        ("--peak-gbps", "-1"),
        ("--peak-gbps", "inf"),
        ("--peak-gbps", "nan"),
    ],
)
def test_thresholds_have_ranges(run_verify, option, value):
    done = run_verify(f"{option}={value}")
    assert (done.code, done.stdout) == (2, "")
    assert f"{option} {value}" in done.stderr


@pytest.mark.parametrize("words", [["--scaling-floor=fast"], ["--world-size=2.5"], ["--no-such"]])
def test_usage_errors(run_verify, words):
    assert run_verify(*words).code == 2


@pytest.mark.parametrize(
    "words", [["--scaling-floor=1", "--loss-tolerance=0"], ["--loss-tolerance=1", "--scaling-floor=0.001"]]
)
def test_the_ends_of_the_ranges_are_inside(run_verify, words):
    assert run_verify(*words).code in (0, 5)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "many.json can't be read: No such file or directory."),
        (b"", "many.json is not JSON: "),
        (b"{'tokens_per_sec': 1}", "many.json is not JSON: "),
        (b"\xff\xfe\x00", "many.json is not JSON: "),
        (b"[" * 200_000, "many.json is not JSON: it is nested too deeply."),
        (b"[1, 2]", "many.json holds no JSON object."),
    ],
)
def test_files_that_say_nothing(run_verify, here, content, says):
    (here / "many.json").unlink()
    if content is not None:
        (here / "many.json").write_bytes(content)
    done = run_verify()
    assert (done.code, done.stdout) == (1, "")
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_folders_of_runs_are_understood(run_verify, here):
    (here / "run").mkdir()
    (here / "run" / "metrics.json").write_text(json.dumps(FOUR))
    assert run_verify("--candidate", "run").code == 0


def test_json(run_verify):
    done = run_verify("--json", "--loss-tolerance", "0.001")
    found = json.loads(done.stdout)
    assert (done.code, found["accepted"], found["world_size"], found["loss_tolerance"]) == (5, False, 4, 0.001)
    assert [(gate["gate"], gate["outcome"]) for gate in found["gates"]] == [
        ("scaling_efficiency", "ok"),
        ("loss", "above_threshold"),
        ("allreduce_bandwidth", "ok"),
    ]
    assert found["gates"][1]["evidence"]["relative_difference"] == 0.005


def test_json_of_files_with_nan_is_still_json(run_verify, here):
    (here / "many.json").write_text(json.dumps(FOUR | {"final_loss": math.nan}))
    done = run_verify("--json")
    assert done.code == 5
    json.loads(done.stdout, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
