"""Every panel and every rule, asked of a real Prometheus that scrapes a real run."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from monitoring.analysis.rules.bottlenecks import KINDS
from monitoring.dashboards import Setup, Target, files_for, write_files
from monitoring.events.time_parts import PARTS
from tests.support.processes import ROOT, Started
from tests.support.prometheus import Prometheus, Series, values
from tests.support.tools import needs

pytestmark = [needs("prometheus"), pytest.mark.slow]

SETUP = Setup(dp=2, tp=2, pp=2, interval=1)
TEXTS = files_for(SETUP)


def _shown() -> Iterator[tuple[str, str]]:
    """What is drawn: where, and the expression."""
    for path, text in TEXTS.items():
        if path.endswith(".json"):
            content, name = json.loads(text), Path(path).stem
            for panel in content["panels"]:
                for target in panel.get("targets", []):
                    yield f"{name}: {panel['title']} {target['refId']}", target["expr"]
            yield from ((f"{name}: {each['name']}", each["expr"]) for each in content["annotations"]["list"])


def _rules(name: str) -> list[dict]:
    return yaml.safe_load(TEXTS[f"prometheus/{name}.rules.yml"])["groups"][0]["rules"]


SHOWN = dict(_shown())
NEEDS_A_GPU = ["run: Goodput B"]
"""Model FLOPs utilization; on a processor the peak is not known. A made-up run has it: test_dashboard_values.py."""
STARTING = 90.0
"""Seconds, as a deadline: eight ranks on few cores."""


@pytest.fixture(scope="module")
def address(tmp_path_factory) -> Iterator[str]:
    """Of a run that goes on until the tests are done, with less to compute than its file says."""
    small = {"layers": 4, "width": 32, "sequence": 32}
    settings = [f"model.args.{key}={value}" for key, value in small.items()]
    settings += ["train.steps=1000000", "memory.budget=4GiB"]
    words = [word for setting in settings for word in ("--set", setting)]
    folder = tmp_path_factory.mktemp("run") / "run"
    mesh = str(ROOT / "configs" / "mesh-2x2x2.yaml")
    with Started("-m", "parallel3d", "run", mesh, "--run-dir", str(folder), *words) as run:
        run.stderr.wait_for(r"^step +\d+/", STARTING)
        url = json.loads((folder / "endpoints.json").read_text())["metrics"]
        yield url.removeprefix("http://").removesuffix("/metrics")
        run.send(signal.SIGINT)
        assert run.finish(STARTING) == 130


@pytest.fixture(scope="module")
def prometheus(address: str, tmp_path_factory) -> Iterator[Prometheus]:
    """Rates are known, and rules have been evaluated."""
    folder = tmp_path_factory.mktemp("prometheus")
    setup = Setup(dp=2, tp=2, pp=2, interval=1, target=Target.parse(address))
    write_files(folder, files_for(setup))
    with Prometheus(folder / "prometheus" / "prometheus.yml", folder / "data") as server:
        assert server.wait_for_data("instance:parallel3d_tokens:rate > 0", STARTING), server.log.text
        yield server


def resolved(expr: str, address: str) -> str:
    """With Grafana's variables filled in as it would."""
    instance = re.escape(address).replace("\\", "\\\\")
    text = expr.replace("$__rate_interval", "20s").replace("$instance", instance)
    assert not re.search(r"\$[a-z_]", text), text
    return text


def by(label: str, found: list[Series]) -> dict[str, float]:
    return {each["metric"][label]: value for each, value in zip(found, values(found), strict=True)}


@pytest.mark.parametrize("where", [where for where in SHOWN if where not in NEEDS_A_GPU])
def test_every_panel_has_data(where, prometheus, address):
    assert prometheus.wait_for_data(resolved(SHOWN[where], address)), SHOWN[where]


@pytest.mark.parametrize("where", NEEDS_A_GPU)
def test_what_needs_a_gpu_is_understood_and_empty(where, prometheus, address):
    assert prometheus.query(resolved(SHOWN[where], address)) == []


@pytest.mark.parametrize("rule", _rules("recording"), ids=lambda rule: rule["record"])
def test_every_recorded_series_has_data(rule, prometheus):
    assert prometheus.wait_for_data(rule["record"])
    assert prometheus.wait_for_data(rule["expr"])


@pytest.mark.parametrize("rule", _rules("alerts"), ids=lambda rule: rule["alert"])
def test_every_series_that_an_alert_looks_at_has_data(rule, prometheus):
    names = set(re.findall(r"[\w:]*parallel3d_[\w:]*", rule["expr"]))
    assert names
    for name in names:
        assert prometheus.wait_for_data(name), name
    assert prometheus.get("query", query=rule["expr"])["resultType"] == "vector"


def test_prometheus_evaluates_all_rules_without_an_error(prometheus):
    groups = prometheus.get("rules")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert {rule["name"] for rule in rules} == {
        *(rule["record"] for rule in _rules("recording")),
        *(rule["alert"] for rule in _rules("alerts")),
    }
    assert [rule["lastError"] for rule in rules if rule["health"] == "err"] == []


def test_phases_of_the_run_add_up(prometheus, address):
    shares = by("phase", prometheus.wait_for_data(resolved(SHOWN["run: Phase share A"], address)))
    assert shares.keys() == set(PARTS)
    assert sum(shares.values()) == pytest.approx(1)
    (goodput,) = values(prometheus.wait_for_data(resolved(SHOWN["run: Goodput A"], address)))
    assert 0 < goodput <= 1


def test_the_grid_is_the_mesh(prometheus, address):
    cells = prometheus.wait_for_data(resolved(SHOWN["mesh: Stragglers now, DP x TP x PP A"], address))
    assert {(cell["metric"]["row"], cell["metric"]["pp"]) for cell in cells} == {
        (f"dp {dp} tp {tp}", str(pp)) for dp in range(2) for tp in range(2) for pp in range(2)
    }
    assert all(0 < score <= 1 for score in values(cells))


def test_every_axis_and_every_kind_of_bottleneck_is_told(prometheus, address):
    axes = by("axis", prometheus.wait_for_data(resolved(SHOWN["mesh: Bytes by axis A"], address)))
    assert {"dp", "tp", "pp"} <= axes.keys()
    stages = by("pp_rank", prometheus.wait_for_data(resolved(SHOWN["mesh: Bubble by stage A"], address)))
    assert stages.keys() == {"0", "1"}
    kinds = by("kind", prometheus.wait_for_data(resolved(SHOWN["run: Bottlenecks A"], address)))
    assert kinds.keys() == set(KINDS)


@pytest.mark.parametrize("query", "AB")
def test_a_healthy_run_counts_no_failures(query, prometheus, address):
    where = f"run: Steps that failed, gradients that were not finite {query}"
    assert values(prometheus.wait_for_data(resolved(SHOWN[where], address))) == [0]


def test_nothing_is_said_of_a_run_that_is_well(prometheus):
    """Eight ranks may lag on two cores, and one of them may be slow for a moment."""
    prometheus.wait_for_data("instance:parallel3d_tokens:rate")
    up = {alert["labels"]["alertname"] for alert in prometheus.get("alerts")["alerts"]}
    assert up <= {"Parallel3dEventLoopLag", "Parallel3dStraggler"}
