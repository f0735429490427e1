"""`parallel3d shards`: the table, its totals, what it refuses, and exit codes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from parallel3d.cli.main import main

RUN = """\
model: {factory: gpt, args: {layers: 2, width: 8, heads: 2, vocabulary: 11, sequence: 6}}
parallel: {tp: 2, pp: 2}
"""


class Outcome(NamedTuple):
    code: int
    stdout: str
    stderr: str


@pytest.fixture
def shards(monkeypatch, capsys, tmp_path):
    """Runs the verb in this process, on the file above."""
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(RUN)

    def run(*words: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["parallel3d", "shards", "run.yaml", *words])
        with pytest.raises(SystemExit) as exit:
            main()
        return Outcome(exit.value.code or 0, *capsys.readouterr())

    return run


TABLE = """\
run.yaml: gpt, 1,984 parameters, tp 2 x pp 2

module                   kind       stage  strategy    pattern    local shape  of      parameters
embedding.tokens         embedding      0  vocab       AllReduce  6 x 8        11 x 8          48
embedding.positions      embedding      0  replicated  -          6 x 8                        48
blocks.0.attention_norm  norm           0  replicated  -          8                            16
blocks.0.attention.q     attention      0  column      AllReduce  4 x 8        8 x 8           36
blocks.0.attention.k     attention      0  column      AllReduce  4 x 8        8 x 8           36
blocks.0.attention.v     attention      0  column      AllReduce  4 x 8        8 x 8           36
blocks.0.attention.o     attention      0  row         AllReduce  8 x 4        8 x 8           40
blocks.0.mlp_norm        norm           0  replicated  -          8                            16
blocks.0.mlp.up          MLP            0  column      AllReduce  16 x 8       32 x 8         144
blocks.0.mlp.down        MLP            0  row         AllReduce  8 x 16       8 x 32         136
blocks.1.attention_norm  norm           1  replicated  -          8                            16
blocks.1.attention.q     attention      1  column      AllReduce  4 x 8        8 x 8           36
blocks.1.attention.k     attention      1  column      AllReduce  4 x 8        8 x 8           36
blocks.1.attention.v     attention      1  column      AllReduce  4 x 8        8 x 8           36
blocks.1.attention.o     attention      1  row         AllReduce  8 x 4        8 x 8           40
blocks.1.mlp_norm        norm           1  replicated  -          8                            16
blocks.1.mlp.up          MLP            1  column      AllReduce  16 x 8       32 x 8         144
blocks.1.mlp.down        MLP            1  row         AllReduce  8 x 16       8 x 32         136
norm                     norm           1  replicated  -          8                            16
head                     linear         1  vocab       AllReduce  6 x 8        11 x 8          48

parameters of each stage, on its first tensor-parallel rank
stage 0  pp=0  556
stage 1  pp=1  524

parameters of each rank, and the memory of its weights
rank tp=0 pp=0  stages 0  556  0.0 MiB
rank tp=1 pp=0  stages 0  548  0.0 MiB
rank tp=0 pp=1  stages 1  524  0.0 MiB
rank tp=1 pp=1  stages 1  516  0.0 MiB
"""


def test_the_table(shards):
    assert shards() == Outcome(0, TABLE, "")


def test_json(shards):
    code, text, stderr = shards("--json", "--set", "parallel.sequence_parallel=true")
    assert (code, stderr) == (0, "")
    found = json.loads(text)
    assert [found[key] for key in ("model", "tp", "pp", "parameters")] == ["gpt", 2, 2, 1984]
    assert (found["sequence_parallel"], found["layers_per_stage"]) == (True, [1, 1])
    assert found["modules"][3] == {
        "path": "blocks.0.attention.q",
        "kind": "attention",
        "stage": 0,
        "strategy": "column",
        "pattern": "AllGatherThenReduceScatter",
        "whole_shape": [8, 8],
        "local_shape": [4, 8],
        "parameters": 36,
    }
    assert found["stages"] == [{"stage": 0, "pp": 0, "parameters": 556}, {"stage": 1, "pp": 1, "parameters": 524}]
    assert found["ranks"][1] == {"tp": 1, "pp": 0, "stages": [0], "parameters": 548}


def test_stages_of_a_rank_that_has_several(shards):
    words = "--set pipeline.schedule=interleaved --set pipeline.virtual_stages=2 --set pipeline.microbatches=2"
    found = json.loads(shards("--json", "--set", "model.args.layers=4", *words.split())[1])
    assert [(stage["stage"], stage["pp"]) for stage in found["stages"]] == [(0, 0), (1, 1), (2, 0), (3, 1)]
    sizes = [stage["parameters"] for stage in found["stages"]]
    assert [rank["parameters"] for rank in found["ranks"] if rank["tp"] == 0] == [
        sizes[0] + sizes[2],
        sizes[1] + sizes[3],
    ]
    assert found["ranks"][0]["stages"] == [0, 2]


def test_tied_parameters_count_once_on_a_rank(shards):
    apart = json.loads(shards("--json", "--set", "model.args.tied=true")[1])
    together = json.loads(shards("--json", "--set", "model.args.tied=true", "--set", "parallel.pp=1")[1])
    assert sum(stage["parameters"] for stage in apart["stages"]) == together["stages"][0]["parameters"] + 48


def test_the_sequence_is_named_where_it_is_cut(shards):
    first, *_ = shards("--set", "parallel.sequence_parallel=true").stdout.splitlines()
    assert first.endswith(", tp 2 x pp 2, sequence cut from blocks.0 to blocks.1")


PLAN = "parallel.tensor_plan={blocks.*.mlp.upp: column}"


def test_what_does_not_fit_is_refused(shards):
    assert shards("--set", PLAN) == Outcome(
        3,
        "",
        '--set parallel.tensor_plan  parallel.tensor_plan["blocks.*.mlp.upp"] = "column": no module has such a path.\n'
        "                            The nearest is blocks.0.mlp.up.\n",
    )
    code, text, stderr = shards("--json", "--set", PLAN)
    assert (code, stderr) == (3, "")
    (error,) = json.loads(text)["errors"]
    assert (error["file"], error["path"]) == ("--set parallel.tensor_plan", 'parallel.tensor_plan["blocks.*.mlp.upp"]')


def test_a_wrong_configuration_is_refused(shards):
    code, stdout, stderr = shards("--set", "parallel.tp=3")
    assert (code, stdout) == (3, "")
    assert "heads(2) is not a multiple of tp(3)" in stderr
    code, stdout, _ = shards("--set", "model.factory=no_such_module:build", "--json")
    assert code == 3
    assert json.loads(stdout)["errors"]
