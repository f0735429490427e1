"""What `parallel3d dashboards` writes: dashboards, rules, their pages, and what starts it all."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import trustme
import yaml

from monitoring.dashboards import Setup, Target, files_for, write_files
from monitoring.dashboards.alert_rules import alerts
from monitoring.events.time_parts import PARTS
from monitoring.prometheus.metric_families import RUN_FAMILIES
from tests.support.processes import ROOT
from tests.support.prometheus import promtool
from tests.support.tools import needs

MESH = ROOT / "configs" / "mesh-2x2x2.yaml"
SETUP = Setup(dp=2, tp=2, pp=2)
ALERT_CASES = Path(__file__).with_name("alerts_promtool.yml")
DASHBOARDS = ("run", "mesh", "ranks")


def dashboard(name: str, setup: Setup = SETUP) -> dict:
    return json.loads(files_for(setup)[f"grafana/dashboards/{name}.json"])


def panels(setup: Setup = SETUP) -> list[dict]:
    return [panel for name in DASHBOARDS for panel in dashboard(name, setup)["panels"] if panel["type"] != "row"]


def titles(setup: Setup) -> set[str]:
    return {panel["title"] for panel in panels(setup)}


def as_yaml(name: str, setup: Setup = SETUP) -> dict:
    return yaml.safe_load(files_for(setup)[name])


# Dashboards.


def test_everything_that_was_asked_for_is_shown():
    assert titles(SETUP) >= {
        "Goodput",
        "Throughput",
        "Phase share",
        "Stragglers now, DP x TP x PP",
        "Stragglers over time",
        "Bubble by stage",
        "Bytes by axis",
        "Loss",
        "Gradient norm",
        "Memory by rank",
        "Memory by kind",
        "Bottlenecks",
        "Event-loop lag",
        "Data queue",
    }


def test_uids_are_those_that_people_have_links_to():
    assert [dashboard(name)["uid"] for name in DASHBOARDS] == ["parallel3d-run", "parallel3d-mesh", "parallel3d-ranks"]


@pytest.mark.parametrize("name", DASHBOARDS)
def test_panels_have_ids_of_their_own_and_do_not_overlap(name):
    content = dashboard(name)
    ids = [panel["id"] for panel in content["panels"]]
    assert len(set(ids)) == len(ids)
    taken = set()
    for panel in content["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells


@pytest.mark.parametrize("name", DASHBOARDS)
def test_the_data_source_is_a_variable_everywhere(name):
    content = dashboard(name, Setup(datasource="Metrics"))
    variables = {each["name"]: each for each in content["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert variables["datasource"]["current"]["value"] == "Metrics"
    uids = re.findall(r'"type": "prometheus",\s+"uid": "([^"]*)"', files_for(SETUP)[f"grafana/dashboards/{name}.json"])
    assert len(uids) > 2 * len([panel for panel in content["panels"] if panel["type"] != "row"])
    assert set(uids) == {"${datasource}"}


def test_only_variables_that_there_are_stand_in_expressions():
    for panel in panels():
        for target in panel["targets"]:
            assert set(re.findall(r"\$\w+", target["expr"])) <= {"$instance", "$__rate_interval", "$1"}, panel["title"]


def test_every_panel_says_what_it_means():
    assert all(panel["description"].endswith(".") for panel in panels())


def test_every_phase_has_a_colour_of_its_own():
    (share,) = [panel for panel in panels() if panel["title"] == "Phase share"]
    colours = {
        each["matcher"]["options"]: each["properties"][0]["value"]["fixedColor"]
        for each in share["fieldConfig"]["overrides"]
    }
    assert tuple(colours) == PARTS
    assert len(set(colours.values())) == len(PARTS)
    assert share["fieldConfig"]["defaults"]["custom"]["stacking"]["mode"] == "normal"


def test_the_grid_is_replicas_and_tensor_ranks_by_stages():
    (grid,) = [panel for panel in panels() if panel["title"] == "Stragglers now, DP x TP x PP"]
    assert grid["transformations"][-1] == {
        "id": "groupingToMatrix",
        "options": {"rowField": "row", "columnField": "pp", "valueField": "Value"},
    }
    (target,) = grid["targets"]
    assert (target["instant"], target["format"]) == (True, "table")


def test_what_a_mesh_has_not_is_not_shown():
    assert titles(SETUP) - titles(Setup(dp=2)) == {"Bubble by stage"}
    assert titles(Setup(dp=2)) - titles(Setup()) == {
        "Bytes by axis",
        "Bus bandwidth",
        "Time of a call",
        "Slowest calls",
    }


def test_a_large_mesh_shows_the_ranks_that_matter():
    small, large = (
        {panel["title"]: panel["targets"][0]["expr"] for panel in panels(setup)}
        for setup in (Setup(dp=64), Setup(dp=64, tp=2))
    )
    assert not any("topk" in expr or "bottomk" in expr for expr in small.values())
    assert large["Stragglers over time: the 64 slowest"].startswith("bottomk(64, ")
    assert large["Memory by rank"].startswith("topk(64, ")
    assert large["Data queue"].startswith("bottomk(64, ")
    assert "topk" not in large["Stragglers now, DP x TP x PP"]  # a cell takes less room than a line


# Rules and their pages.


def test_every_alert_has_a_severity_and_a_page():
    rules = as_yaml("prometheus/alerts.rules.yml")["groups"][0]["rules"]
    assert len(rules) == 7
    for rule in rules:
        assert rule["labels"]["severity"] in ("critical", "warning")
        page = ROOT / rule["annotations"]["runbook_url"]
        text = page.read_text()
        assert f"`{rule['alert']}`" in text
        assert rule["labels"]["severity"] in text
        for heading in ("## What it means", "## What to look at", "## What to do"):
            assert heading in text, page


def test_no_page_is_left_without_an_alert():
    assert {page.stem for page in (ROOT / "docs" / "runbooks").glob("*.md")} == {alert.runbook for alert in alerts()}


def test_pages_may_be_elsewhere():
    rules = as_yaml("prometheus/alerts.rules.yml", Setup(runbooks="https://wiki.example/p3d/"))["groups"][0]["rules"]
    assert rules[0]["annotations"]["runbook_url"] == "https://wiki.example/p3d/no-progress.md"


@pytest.mark.parametrize(("interval", "window"), [(1, "60s"), (5, "60s"), (15, "60s"), (30, "120s")])
def test_rates_are_taken_over_four_scrapes_at_least(interval, window):
    text = files_for(Setup(interval=interval))["prometheus/recording.rules.yml"]
    assert set(re.findall(r"\[(\w+)\]", text)) == {window}
    assert f"interval: {interval}s" in text


@needs("promtool")
@pytest.mark.parametrize("setup", [Setup(), SETUP, Setup(dp=64, tp=8, pp=16, interval=30)], ids=lambda s: s.mesh)
def test_promtool_finds_nothing_wrong(setup, tmp_path):
    write_files(tmp_path, files_for(setup))
    done = promtool("check", "config", "--lint=all", "--lint-fatal", "prometheus/prometheus.yml", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("SUCCESS: 7 rules found") == 2


@needs("promtool")
def test_prometheus_takes_the_configuration_for_ranks_that_are_elsewhere(tmp_path):
    trustme.CA().cert_pem.write_to_path(tmp_path / "ca.pem")
    (tmp_path / "token").write_text("a-token-of-16-characters")
    away = Target("node1", 443, tls=True, token_file=str(tmp_path / "token"), ca_file=str(tmp_path / "ca.pem"))
    write_files(tmp_path, files_for(Setup(dp=2, target=away, per_rank=True)))
    done = promtool("check", "config", "prometheus/prometheus.yml", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@needs("promtool")
def test_alerts_fire_when_they_should_and_only_then(tmp_path):
    write_files(tmp_path, files_for(SETUP))
    (tmp_path / "prometheus" / "cases.yml").write_text(ALERT_CASES.read_text())
    done = promtool("test", "rules", "cases.yml", cwd=tmp_path / "prometheus")
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_case_in_which_it_fires_and_one_in_which_it_is_quiet():
    cases = [
        case for test in yaml.safe_load(ALERT_CASES.read_text())["tests"] for case in test.get("alert_rule_test", [])
    ]
    names = {alert.name for alert in alerts()}
    assert {case["alertname"] for case in cases if case["exp_alerts"]} == names
    assert {case["alertname"] for case in cases if not case["exp_alerts"]} == names


def test_everything_that_is_recorded_is_checked_or_used_by_an_alert():
    recorded = {rule["record"] for rule in as_yaml("prometheus/recording.rules.yml")["groups"][0]["rules"]}
    text = ALERT_CASES.read_text() + "".join(alert.expr for alert in alerts())
    assert [name for name in recorded if name not in text] == []


# What starts it.


def test_prometheus_asks_the_run_and_with_its_token_where_it_is_elsewhere():
    assert as_yaml("prometheus/prometheus.yml")["scrape_configs"] == [
        {"job_name": "parallel3d", "static_configs": [{"targets": ["127.0.0.1:9847"]}]}
    ]
    away = Setup(target=Target("node1", 443, tls=True, token_file="/t", ca_file="/c"), per_rank=True)
    access = {
        "authorization": {"type": "Bearer", "credentials_file": "/t"},
        "tls_config": {"ca_file": "/c"},
    }
    assert as_yaml("prometheus/prometheus.yml", away)["scrape_configs"] == [
        {"job_name": "parallel3d", "scheme": "https", **access, "static_configs": [{"targets": ["node1:443"]}]},
        {
            "job_name": "parallel3d-ranks",
            **access,
            "http_sd_configs": [{"url": "https://node1:443/sd", "refresh_interval": "30s", **access}],
        },
    ]


def test_the_compose_file_starts_all_three_where_they_reach_each_other():
    content = as_yaml("compose.yaml", Setup(settings=("parallel.dp=4",)))
    run, prometheus, grafana = (content["services"][name] for name in ("run", "prometheus", "grafana"))
    assert run["command"] == [
        "parallel3d",
        "run",
        "run.yaml",
        "--set",
        "parallel.dp=4",
        "--set",
        "monitoring.port=9847",
    ]
    # One network namespace: the run listens on loopback, and must not be the one that holds it, as it ends.
    assert run["network_mode"] == grafana["network_mode"] == "service:prometheus"
    assert "network_mode" not in prometheus
    assert prometheus["ports"] == ["127.0.0.1:9090:9090", "127.0.0.1:3000:3000"]
    assert not {"ports", "networks"} & (run.keys() | grafana.keys())
    named = {volume.partition(":")[0] for each in (run, prometheus, grafana) for volume in each["volumes"]}
    assert {name for name in named if not name.startswith((".", "$"))} == content["volumes"].keys()


def test_the_compose_file_mounts_what_is_written_where_it_is_looked_for():
    texts = files_for(SETUP)
    services = as_yaml("compose.yaml")["services"]
    mounts = dict(volume.split(":")[:2] for name in ("prometheus", "grafana") for volume in services[name]["volumes"])
    for source in ("./prometheus", "./grafana/provisioning", "./grafana/dashboards"):
        assert any(name.startswith(f"{source[2:]}/") for name in texts)
    provider = as_yaml("grafana/provisioning/dashboards/parallel3d.yaml")["providers"][0]
    assert mounts["./grafana/dashboards"] == provider["options"]["path"]
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert f"grafana/dashboards/{Path(home).name}" in texts
    assert f"--config.file={mounts['./prometheus']}/prometheus.yml" in services["prometheus"]["command"]


def test_the_image_has_every_package_of_ours():
    text = as_yaml("compose.yaml")["services"]["run"]["build"]["dockerfile_inline"]
    copied = re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE)
    assert all((ROOT / name).exists() for line in copied for name in line.split())
    packages = re.search(r"^packages = \[(.*?)\]", (ROOT / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL)
    assert packages is not None
    assert {name.partition(".")[0] for name in re.findall(r'"([^"]+)"', packages[1])} <= set(copied)


def test_a_run_that_is_elsewhere_is_only_looked_at():
    assert as_yaml("compose.yaml", Setup(target=Target("node1", 443)))["services"].keys() == {"prometheus", "grafana"}


def test_prometheus_in_its_container_has_the_files_that_let_it_in():
    away = Setup(target=Target(tls=True, token_file="/secrets/token", ca_file="ca.pem"))
    services = as_yaml("compose.yaml", away)["services"]
    assert services.keys() == {"prometheus", "grafana"}  # a run that asks for a token is not the compose file's
    assert services["prometheus"]["volumes"][-1] == "/secrets/token:/secrets/token:ro"
    assert not any("ca.pem" in volume for volume in services["prometheus"]["volumes"])  # beside prometheus.yml


def test_the_data_source_is_provisioned_under_its_name():
    (source,) = as_yaml("grafana/provisioning/datasources/parallel3d.yaml", Setup(datasource="M", interval=7))[
        "datasources"
    ]
    assert (source["name"], source["jsonData"]["timeInterval"]) == ("M", "7s")


# The target.


@pytest.mark.parametrize(
    ("text", "target", "url"),
    [
        ("127.0.0.1:9000", Target("127.0.0.1", 9000), "http://127.0.0.1:9000"),
        ("http://localhost:80/metrics", Target("localhost", 80), "http://localhost:80"),
        ("https://node1.example:443/", Target("node1.example", 443, tls=True), "https://node1.example:443"),
        ("[::1]:9000", Target("::1", 9000), "http://[::1]:9000"),
    ],
)
def test_targets_are_read(text, target, url):
    assert Target.parse(text) == target
    assert target.url == url


@pytest.mark.parametrize(
    "text",
    [
        "",
        "node1",
        "node1:",
        ":80",
        "node1:0",
        "node1:65536",
        "node1:x",
        "ftp://node1:80",
        "node1:80/page",
        "[::1]",
        "u:p@n:80",
    ],
)
def test_other_targets_are_refused(text):
    with pytest.raises(ValueError, match=r"give host and port|by http or https"):
        Target.parse(text)


@pytest.mark.parametrize(
    ("host", "local"), [("127.0.0.2", True), ("::1", True), ("localhost", True), ("10.0.0.1", False), ("n", False)]
)
def test_whether_a_target_is_on_this_host_alone(host, local):
    assert Target(host).is_local is local


# The command.


def command(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "parallel3d", "dashboards", *words]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "", "COLUMNS": "120"}
    return subprocess.run(line, cwd=cwd, env=environment, capture_output=True, text=True, timeout=60)


def test_the_command_writes_what_it_prints_and_the_same_bytes_again(tmp_path):
    first, second = (command("--out", "out", str(MESH), cwd=tmp_path) for _ in range(2))
    assert (first.returncode, first.stdout) == (0, second.stdout), first.stderr
    assert first.stderr.endswith("the run needs monitoring.port=9847.\n")
    names = {*files_for(SETUP), "run.yaml"}
    assert set(first.stdout.split()) == {f"out/{name}" for name in names}
    found = {str(path.relative_to(tmp_path / "out")): path.read_text() for path in (tmp_path / "out").rglob("*.*")}
    assert found == files_for(SETUP, MESH.read_text())


def test_the_mesh_can_be_given_without_a_file(tmp_path):
    done = command(
        "--out", ".", "--dp", "4", "--pp", "2", "--prometheus", "127.0.0.1:8000", "--interval", "2", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    settings = ("parallel.dp=4", "parallel.pp=2")
    expected = files_for(Setup(dp=4, pp=2, target=Target(port=8000), interval=2, settings=settings))
    assert {name: (tmp_path / name).read_text() for name in expected} == expected
    assert not (tmp_path / "run.yaml").exists()


def test_the_endpoint_is_the_files(tmp_path):
    (tmp_path / "run.yaml").write_text("parallel: {dp: 2}\nmonitoring: {port: 9000, per_rank: true}\n")
    done = command("--out", "o", "run.yaml", "--tp", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    expected = files_for(Setup(dp=2, tp=2, target=Target(port=9000), per_rank=True, settings=("parallel.tp=2",)))
    assert {name: (tmp_path / "o" / name).read_text() for name in expected} == expected


def test_a_run_with_tls_is_asked_with_its_token(tmp_path):
    (tmp_path / "run.yaml").write_text(
        "monitoring: {host: 0.0.0.0, port: 9000, token_file: token, tls_certificate: c.pem, tls_key: k.pem}\n"
    )
    done = command("--out", "o", "run.yaml", "--ca-file", "/ca.pem", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    target = Target("127.0.0.1", 9000, tls=True, token_file=str(tmp_path / "token"), ca_file="/ca.pem")
    expected = files_for(Setup(target=target))
    assert {name: (tmp_path / "o" / name).read_text() for name in expected} == expected


def test_files_of_others_are_left_alone(tmp_path):
    (tmp_path / "compose.yaml").write_text("services: {}\n")
    done = command("--out", ".", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr == (
        "parallel3d: dashboards can't be written: compose.yaml was not written by this command, and is left as it is. "
        "Give another folder.\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["compose.yaml"]
    assert (tmp_path / "compose.yaml").read_text() == "services: {}\n"


def test_a_folder_that_can_not_be_written_is_an_error(tmp_path):
    (tmp_path / "grafana").write_text("")
    done = command("--out", ".", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("parallel3d: dashboards can't be written: ")


def test_a_bad_target_and_a_bad_file_have_their_own_exit_codes(tmp_path):
    assert command("--out", "o", "--prometheus", "node1", cwd=tmp_path).returncode == 2
    (tmp_path / "run.yaml").write_text("parallel: {dp: 0}\n")
    assert command("--out", "o", "run.yaml", cwd=tmp_path).returncode == 3
    assert not (tmp_path / "o").exists()


# Their page.


def test_the_page_lists_every_metric_with_its_labels():
    text = (ROOT / "docs" / "prometheus.md").read_text()
    listed = re.findall(r"^\| `(\w+)(?:\{([\w,]*)\})?` \| (counter|gauge|histogram|info) \|", text, re.MULTILINE)
    assert {(name, tuple(filter(None, labels.split(","))), kind) for name, labels, kind in listed} == {
        (name, family.labels, family.kind) for name, family in RUN_FAMILIES.items()
    }


def test_the_page_lists_every_alert():
    text = (ROOT / "docs" / "prometheus.md").read_text()
    for alert in alerts():
        assert f"| `{alert.name}` | {alert.severity} | " in text
