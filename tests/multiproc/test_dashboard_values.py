"""What expressions come to: a real Prometheus scrapes a run whose figures are known."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from monitoring.dashboards import Setup, Target, files_for, write_files
from monitoring.dashboards.expressions import Expressions
from monitoring.events.time_parts import PARTS
from monitoring.prometheus.metric_families import RUN_FAMILIES
from tests.support.made_up_run import COMPUTE, PLACES, SLOW_RANK, SLOW_SCORE, TOKENS, made_up_run, page
from tests.support.prometheus import Prometheus, values
from tests.support.tools import needs

pytestmark = [needs("prometheus"), pytest.mark.slow]

ASKED = Expressions(window="4s")


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory) -> Iterator[Prometheus]:
    """It has scraped for as long as rates are taken over; before, they are less than they should be."""
    folder = tmp_path_factory.mktemp("prometheus")
    with made_up_run() as address:
        write_files(folder, files_for(Setup(dp=2, tp=2, pp=2, interval=1, target=Target.parse(address))))
        with Prometheus(folder / "prometheus" / "prometheus.yml", folder / "data") as server:
            assert server.wait_for_data("parallel3d_tokens_total offset 4s"), server.log.text
            yield server


def test_the_made_up_run_has_names_and_labels_of_real_ones():
    for family in text_string_to_metric_families(page(0.0, 1.0)):
        for sample in family.samples:
            ends = ("_bucket", "_sum", "_count")
            name = sample.name.removeprefix("parallel3d_")
            real = name if name in RUN_FAMILIES else next(name.removesuffix(end) for end in ends if name.endswith(end))
            assert {*sample.labels} - {"le"} == {*RUN_FAMILIES[real].labels}, sample


@pytest.mark.parametrize(
    ("expr", "value"),
    [
        (ASKED.tokens, TOKENS),
        (ASKED.goodput, COMPUTE),
        (ASKED.step_seconds, 0.1),
        (ASKED.core_share, COMPUTE / (COMPUTE + 0.01)),
        (ASKED.unattributed_share, 0.01),
        (ASKED.lag, 0.000995),
    ],
    ids=["tokens", "goodput", "step_seconds", "core_share", "unattributed_share", "lag"],
)
def test_one_figure_a_run(prometheus, expr, value):
    assert values(prometheus.wait_for_data(expr)) == [pytest.approx(value, rel=0.05)]


def test_phases_have_their_shares_and_add_up(prometheus):
    shares = {each["metric"]["phase"]: float(each["value"][1]) for each in prometheus.query(ASKED.phase_share)}
    assert shares.keys() == set(PARTS)
    assert shares["compute"] == pytest.approx(COMPUTE, rel=0.05)
    assert sum(shares.values()) == pytest.approx(1)


def test_bytes_are_told_by_axis(prometheus):
    found = {each["metric"]["axis"]: float(each["value"][1]) for each in prometheus.query(ASKED.axis_bytes)}
    assert found == pytest.approx({"dp": 3e6, "tp": 2e6, "pp": 1e6}, rel=0.05)


def test_severities_are_levels(prometheus):
    found = {each["metric"]["kind"]: float(each["value"][1]) for each in prometheus.query(ASKED.bottlenecks)}
    assert found == {"straggler": 0, "tp_comm": 3}


def test_the_grid_has_a_cell_for_each_place_and_the_slow_one_stands_out(prometheus):
    panels = json.loads(files_for(Setup(dp=2, tp=2, pp=2))["grafana/dashboards/mesh.json"])["panels"]
    (target,) = next(panel["targets"] for panel in panels if panel["title"].startswith("Stragglers now"))
    found = prometheus.query(target["expr"].replace("$instance", ".*"))
    cells = {(each["metric"]["row"], each["metric"]["pp"]): float(each["value"][1]) for each in found}
    slow = PLACES[SLOW_RANK]
    assert cells == {
        (f"dp {dp} tp {tp}", str(pp)): SLOW_SCORE if (dp, tp, pp) == slow else 1.0 for dp, tp, pp in PLACES
    }


def test_only_the_alert_of_the_slow_rank_is_up(prometheus):
    """Not for long enough to fire, but it is seen."""
    prometheus.wait_for_data('ALERTS{alertname="Parallel3dStraggler"}')
    (alert,) = prometheus.get("alerts")["alerts"]
    assert (alert["labels"]["alertname"], alert["labels"]["rank"]) == ("Parallel3dStraggler", str(SLOW_RANK))
    dp, tp, pp = PLACES[SLOW_RANK]
    assert alert["annotations"]["summary"].startswith(f"rank {SLOW_RANK} (dp={dp} tp={tp} pp={pp}) of 127.0.0.1:")


def test_the_utilization_of_a_known_device_is_shown(prometheus):
    panels = json.loads(files_for(Setup())["grafana/dashboards/run.json"])["panels"]
    targets = next(panel["targets"] for panel in panels if panel["title"] == "Goodput" and len(panel["targets"]) == 2)
    assert values(prometheus.query(targets[1]["expr"].replace("$instance", ".*"))) == [0.4]
