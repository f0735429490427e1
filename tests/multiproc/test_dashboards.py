"""Every panel and every rule, asked of a real Prometheus that scrapes a run."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from monitoring.dashboards import Setup, Target, files_for, write_files
from tests.made_up_run import made_up_run
from tests.prometheus import Prometheus, needs_prometheus

pytestmark = [needs_prometheus, pytest.mark.slow]

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


def resolved(expr: str, address: str) -> str:
    """With Grafana's variables filled in as it would."""
    text = expr.replace("$__rate_interval", "15s").replace("$instance", re.escape(address))
    assert not re.search(r"\$[a-z_]", text), text
    return text.replace("\\.", "\\\\.")


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with made_up_run() as address:
        yield address


@pytest.fixture(scope="module")
def prometheus(address: str, tmp_path_factory) -> Iterator[Prometheus]:
    """It has scraped twice, so that rates are known, and its rules have been evaluated."""
    folder = tmp_path_factory.mktemp("prometheus")
    setup = Setup(dp=2, tp=2, pp=2, interval=1, target=Target.parse(address))
    write_files(folder, files_for(setup))
    with Prometheus(folder / "prometheus" / "prometheus.yml", folder / "data") as server:
        assert server.wait_for_data("instance:parallel3d_tokens:rate"), server.log.text
        yield server


@pytest.mark.parametrize("where", SHOWN)
def test_every_panel_has_data(where, prometheus, address):
    assert prometheus.wait_for_data(resolved(SHOWN[where], address)), SHOWN[where]


@pytest.mark.parametrize("rule", _rules("recording"), ids=lambda rule: rule["record"])
def test_every_recorded_series_has_data(rule, prometheus):
    assert prometheus.wait_for_data(rule["record"])
    assert prometheus.query(rule["expr"])


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
