"""A real Prometheus and a run on all of its host's addresses: let in with the run's token over TLS, and only so."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from monitoring.dashboards import Setup, Target, files_for, write_files
from tests.support.processes import ROOT, Started
from tests.support.prometheus import Prometheus, values
from tests.support.tools import needs

pytestmark = [needs("prometheus"), pytest.mark.slow]

TOKEN = "a-token-of-this-test-alone"
STARTING = 90.0
"""Seconds, as a deadline."""


@pytest.fixture(scope="module")
def secrets(tmp_path_factory) -> Path:
    """A folder with the run's token and certificate, the root that it leads to, and a wrong token."""
    folder = tmp_path_factory.mktemp("secrets")
    root = trustme.CA()
    certificate = root.issue_cert("127.0.0.1", "localhost")
    root.cert_pem.write_to_path(folder / "ca.pem")
    certificate.private_key_pem.write_to_path(folder / "key.pem")
    for number, pem in enumerate(certificate.cert_chain_pems):
        pem.write_to_path(folder / "certificate.pem", append=number > 0)
    (folder / "token").write_text(TOKEN)
    (folder / "wrong").write_text(TOKEN[::-1])
    return folder


@pytest.fixture(scope="module")
def port(secrets: Path, tmp_path_factory) -> Iterator[int]:
    settings = {
        "host": "0.0.0.0",
        "token_file": secrets / "token",
        "tls_certificate": secrets / "certificate.pem",
        "tls_key": secrets / "key.pem",
    }
    words = [word for key, value in settings.items() for word in ("--set", f"monitoring.{key}={value}")]
    folder = tmp_path_factory.mktemp("run") / "run"
    words += ["--set", "train.steps=1000000", "--set", "model.args.layers=1", "--run-dir", str(folder)]
    with Started("-m", "parallel3d", "run", str(ROOT / "configs" / "single.yaml"), *words) as run:
        run.stderr.wait_for(r"^step +\d+/", STARTING)
        url = json.loads((folder / "endpoints.json").read_text())["metrics"]
        yield int(url.rpartition(":")[2].partition("/")[0])
        run.send(signal.SIGINT)
        assert run.finish(STARTING) == 130


def prometheus(target: Target, folder: Path) -> Prometheus:
    write_files(folder, files_for(Setup(interval=1, target=target)))
    return Prometheus(folder / "prometheus" / "prometheus.yml", folder / "data")


def test_with_token_and_root_it_is_let_in(port, secrets, tmp_path):
    target = Target("127.0.0.1", port, tls=True, token_file=str(secrets / "token"), ca_file=str(secrets / "ca.pem"))
    with prometheus(target, tmp_path) as server:
        assert server.wait_for_data("parallel3d_run_info")
        assert values(server.query("up")) == [1]


@pytest.mark.parametrize(
    ("tls", "token", "ca", "said"),
    [
        (True, "wrong", "ca.pem", "401"),
        pytest.param(True, None, "ca.pem", "401", marks=pytest.mark.exhaustive),
        pytest.param(True, "token", None, "certificate", marks=pytest.mark.exhaustive),
        pytest.param(False, "token", None, "", marks=pytest.mark.exhaustive),
    ],
    ids=["wrong token", "no token", "no root", "no TLS"],
)
def test_otherwise_it_is_not(port, secrets, tmp_path, tls, token, ca, said):
    files = {"token_file": token and str(secrets / token), "ca_file": ca and str(secrets / ca)}
    with prometheus(Target("127.0.0.1", port, tls=tls, **files), tmp_path) as server:
        assert values(server.wait_for_data("up")) == [0]
        (target,) = server.get("targets")["activeTargets"]
        assert said in target["lastError"]
        assert server.query("parallel3d_run_info") == []
