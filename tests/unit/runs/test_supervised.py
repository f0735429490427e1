"""A run that can't be started: nothing is left running or listening, no token is kept, and the folder says why."""

from __future__ import annotations

import errno
import json
import threading

import pytest

from monitoring.http.endpoint import Endpoint
from parallel3d.config import load_config
from parallel3d.planning.preflight import ModelFacts
from parallel3d.runs import lifecycle, supervised
from parallel3d.runs.supervised import Run
from runtime.errors import LaunchError


class Warm:
    """A fork server that was never needed."""

    run_id = "id"
    discarded = False

    def discard(self) -> None:
        self.discarded = True


@pytest.fixture
def endpoint():
    endpoint = Endpoint.open("127.0.0.1", None)
    yield endpoint
    endpoint.close()


@pytest.fixture
def run(here, monkeypatch, endpoint) -> Run:
    monkeypatch.setattr(lifecycle, "open_endpoint", lambda config, locate: endpoint)
    return Run(load_config(None, environ={}), facts=ModelFacts())


def fails(error: Exception):
    def fail(*_):
        raise error

    return fail


NO_FILES = OSError(errno.EMFILE, "Too many open files")


@pytest.mark.parametrize(
    ("module", "name", "error"),
    [(supervised, "start_launch", LaunchError("no room for a fork server")), (lifecycle, "RunMonitor", NO_FILES)],
)
async def test_what_fails_after_the_folder_was_made_is_recorded_in_it(
    here, monkeypatch, endpoint, run, module, name, error
):
    warm = Warm()
    monkeypatch.setattr(supervised, "warm_up_for", lambda config: warm)
    monkeypatch.setattr(module, name, fails(error))
    with pytest.raises(type(error)):
        await run.__aenter__()
    folder = here / "runs" / run.run_id
    metrics = json.loads((folder / "metrics.json").read_text())
    assert (metrics["status"], metrics["error"]["message"]) == ("failed", f"the run could not be started: {error}")
    assert endpoint.listener.fileno() == -1
    assert "token" not in run.endpoints
    assert "token" not in json.loads((folder / "endpoints.json").read_text())
    assert warm.discarded
    assert "parallel3d-monitor" not in [thread.name for thread in threading.enumerate()]


async def test_a_fork_server_that_cannot_be_started(here, monkeypatch, endpoint, run):
    monkeypatch.setattr(supervised, "warm_up_for", fails(LaunchError("no fork server")))
    with pytest.raises(LaunchError):
        await run.__aenter__()
    assert endpoint.listener.fileno() == -1
    assert not (here / "runs").exists()
