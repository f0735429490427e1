"""A measured step, read from its own file or from the folder of a run."""

from __future__ import annotations

import json

import pytest

from monitoring.events.trace import Span, chrome_trace, to_bytes
from parallel3d.pipeline.schedules.build import build
from parallel3d.pipeline.simulation.measured import Measured
from parallel3d.reports.run_reader import load_measured_step
from runtime.errors import InvalidCall

TABLE = build("1f1b", 2, 4).with_communication()


def measured_step() -> Measured:
    return Measured.of(TABLE, [[(100 + at, 100.5 + at, 0.0, 0.0) for at in range(len(each))] for each in TABLE.columns])


def test_files(tmp_path):
    measured, path = measured_step(), tmp_path / "step.json"
    path.write_text(json.dumps(measured.to_json()))
    assert load_measured_step(path) == measured
    path.write_text(json.dumps({**measured.to_json(), "starts": [[0.0]]}))
    with pytest.raises(InvalidCall, match=r"step\.json holds no measured step: a measured step has one start, one end"):
        load_measured_step(path)
    path.write_text("[]")
    with pytest.raises(InvalidCall, match=r"step\.json holds no measured step"):
        load_measured_step(path)


def test_the_last_step_of_a_run(tmp_path):
    """From its trace: of several replicas, tensor-parallel ranks and steps, one pipeline in one step."""
    names = {1: "rank 1 (dp=0 tp=0 pp=0)", 0: "rank 0 (dp=0 tp=0 pp=1)", 2: "rank 2 (dp=1 tp=0 pp=0)"}
    details = {"waited": 0.001, "cpu": 0.002}
    ranks = {
        rank: [
            Span(1, str(each), each.kind, step + 0.01 * at, step + 0.01 * at + 0.008, {"step": step, **details})
            for step in (3, 4)
            for at, each in enumerate(TABLE.columns[column])
        ]
        for rank, column in ((1, 0), (0, 1), (2, 0))
    }
    (tmp_path / "trace.json.gz").write_bytes(to_bytes(chrome_trace(ranks, names)))
    found = load_measured_step(tmp_path)
    assert found.table.columns == TABLE.columns
    assert (found.table.stages, found.table.microbatches) == (TABLE.stages, TABLE.microbatches)
    assert found.makespan == pytest.approx(0.01 * max(map(len, TABLE.columns)) - 0.002, abs=1e-6)
    assert {waited for column in found.waits for waited in column} == {0.001}
    for column, worked_off in zip(TABLE.columns, found.worked_off, strict=True):
        assert [bool(seconds) for seconds in worked_off] == ["RECV" in each.kind for each in column]


def test_a_folder_without_a_trace(tmp_path):
    with pytest.raises(InvalidCall, match=r"holds no measured step: .*trace\.json\.gz"):
        load_measured_step(tmp_path)
    (tmp_path / "trace.json.gz").write_bytes(to_bytes({"traceEvents": []}))
    with pytest.raises(InvalidCall, match=r"it has no actions of a pipeline"):
        load_measured_step(tmp_path)
