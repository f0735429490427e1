"""The scripts in examples/ do what they say."""

from __future__ import annotations

import pytest

from tests.support.processes import ROOT, Launched

EXAMPLES = ROOT / "examples"


def run(num_ranks: int, *args: str) -> str:
    with Launched("-n", str(num_ranks), "--no-prefix", *args, preload=None) as launched:
        assert launched.finish() == 0, launched.stderr.text
        assert launched.stderr.text == ""
        return launched.stdout.text


@pytest.mark.parametrize(
    ("name", "num_ranks", "text"),
    [
        ("overlap.py", 2, "mean of the ranks 0.5, computed meanwhile 512.0\n"),
        ("send_recv.py", 4, "after 4 stages: [16.0, 16.0, 16.0]\n"),
    ],
)
def test_an_example_prints_its_result(name, num_ranks, text):
    assert run(num_ranks, str(EXAMPLES / name)) == text


def test_the_tour_is_correct_on_every_group():
    out = run(8, str(EXAMPLES / "mesh_tour.py"), str(ROOT / "configs" / "mesh-2x2x2.yaml"))
    assert out.count("correct on every rank") == 4
    assert "WRONG" not in out


def test_training(tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text(
        "model: {args: {layers: 2, width: 16, heads: 2, sequence: 16}}\n"
        "parallel: {dp: 2}\n"
        "train: {steps: 3, batch_size: 4}\n"
    )
    first, summary, *_ = run(2, str(EXAMPLES / "train.py"), str(config)).splitlines()
    assert first.startswith("step 0: loss ")
    assert summary.startswith("3 steps, ")


def test_no_example_is_forgotten_here():
    own = {"mesh_tour.py", "overlap.py", "send_recv.py", "train.py"}
    elsewhere = {"gradient_worker.py"}  # test_gradient_server_runs.py
    assert {path.name for path in EXAMPLES.glob("*.py")} == own | elsewhere
