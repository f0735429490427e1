"""`parallel3d serve-gradients` and `parallel3d join` as users type them: they train what one process would."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import struct
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import trustme

from runtime.gradient_server.wire.link import CLOSE_SECONDS
from tests.support.gradient_clients import frame, text
from tests.support.processes import ROOT, SECONDS, Started, write_script

pytestmark = pytest.mark.slow

STEPS, SAMPLES = 8, 7
# A model of the user's own that leaves its weights where the environment says, and data that waits at a gate.
OWN = """
import atexit
import os
import torch
from torch import nn

built = []

class Noted(nn.Module):
    has_trained = False

    def forward(self, x):
        Noted.has_trained = Noted.has_trained or torch.is_grad_enabled() and x.device.type != "meta"
        return x

def build():
    built.append(nn.Sequential(nn.Embedding(11, 6), Noted(), nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 11)))
    return built[-1]

@atexit.register
def save():
    if Noted.has_trained and "WEIGHTS" in os.environ:
        torch.save({name: each.detach() for name, each in built[-1].named_parameters()}, os.environ["WEIGHTS"])

def plain(output, target):
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())

def infinite(output, target):
    return plain(output, target) * float("inf")

class Data:
    def __len__(self):
        return 1000

    def __getitem__(self, index):
        if "GATE" in os.environ and index >= int(os.environ["GATE_AT"]):
            with open(os.environ["GATE"]) as gate:  # until somebody opens it for writing
                gate.read()
            os.environ.pop("GATE", None)
        numbers = torch.Generator().manual_seed(index)
        inputs, targets = torch.randint(0, 11, (2, 5), generator=numbers)
        targets[: index % 5] = -100  # some samples count less than others
        return inputs, targets
"""
YAML = f"""
model: {{factory: "own:build"}}
data: {{factory: "own:Data", shuffle: false, prefetch: 1}}
optimizer: {{lr: 0.05, clip_norm: 1.0, schedule: cosine, warmup_steps: 2}}
runtime: {{threads: 1}}
train: {{steps: {STEPS}, batch_size: {SAMPLES}, precision: float64}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs")
    (path / "run.yaml").write_text(YAML)
    write_script(path, OWN, "own.py")
    return path


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Any]:
    """What `parallel3d run` makes of it on one process."""
    command = ("-m", "parallel3d", "run", "run.yaml", "--run-dir", "alone", "--json")
    with Started(*command, cwd=folder, WEIGHTS=str(folder / "alone.pt")) as started:
        assert started.finish(60) == 0, started.stderr.text
        return {"weights": load(folder / "alone.pt"), **json.loads(started.stdout.text)}


@pytest.fixture
def processes() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


class Server(Started):
    """`serve-gradients`, which listens by now."""

    def __init__(self, *options: str, workers: int, bind: str = "127.0.0.1:0", **environment: str) -> None:
        sizes = ("--workers", str(workers), "--samples", str(SAMPLES))
        super().__init__("-m", "parallel3d", "serve-gradients", "--bind", bind, *sizes, *options, **environment)
        self.address = self.stderr.wait_for(r"^gradient server: (\S+)$")[1]

    def wait_for_joins(self, number: int) -> None:
        self.stderr.wait_for(rf"(?s)({re.escape(JOINED)}.*?){{{number}}}")


JOINED = '"event": "joined"'


class Worker(Started):
    """`join`, with its weights in a file."""

    def __init__(self, folder: Path, address: str, *options: str, **environment: str) -> None:
        self.weights_file = folder / f"{os.urandom(4).hex()}.pt"
        command = ("-m", "parallel3d", "join", address, "run.yaml", "--json", *options)
        super().__init__(*command, cwd=folder, WEIGHTS=str(self.weights_file), **environment)

    @property
    def found(self) -> dict[str, Any]:
        return json.loads(self.stdout.text)


class Gate:
    """Where a worker waits for a step's samples, which it may load while it computes the step before."""

    def __init__(self, folder: Path, step: int) -> None:
        self._path = folder / f"{os.urandom(4).hex()}.gate"
        os.mkfifo(self._path)
        self.environment = {"GATE": str(self._path), "GATE_AT": str(step * SAMPLES)}

    def reached(self) -> None:
        """Waits until the worker is there."""
        self._held = os.open(self._path, os.O_WRONLY)

    def open(self) -> None:
        os.close(self._held)


def load(path: Path) -> dict[str, torch.Tensor]:
    return torch.load(path, weights_only=True)


def check_weights(worker: Worker, alone: dict[str, Any]) -> None:
    mine = load(worker.weights_file)
    assert list(mine) == list(alone["weights"])
    for name, expected in alone["weights"].items():
        torch.testing.assert_close(mine[name], expected, rtol=0, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}")


def check_losses(worker: Worker, alone: dict[str, Any]) -> None:
    found = worker.found
    assert found["losses"] == pytest.approx(alone["losses"][found["first_step"] :], abs=1e-6)
    assert found["grad_norms"] == pytest.approx(alone["grad_norms"][found["first_step"] :], abs=1e-6)
    assert found["learning_rates"] == alone["learning_rates"][found["first_step"] :]


def finish(*started: Started) -> list[int]:
    return [each.finish(60) for each in started]


def complain(*started: Started) -> str:
    return "\n".join(f"{each.stdout.text}\n{each.stderr.text}" for each in started)


# They train what one process would.


@pytest.mark.parametrize(
    ("num_workers", "options"),
    [
        (2, ()),
        pytest.param(3, ("--set", "pipeline.microbatches=7"), marks=pytest.mark.exhaustive),
        pytest.param(3, ("--set", "comm.bucket_size=1 KiB"), marks=pytest.mark.exhaustive),
    ],
    ids=["two", "three, microbatches", "three"],
)
def test_workers_train_as_one_process(processes, folder, alone, num_workers, options):
    server = processes.enter_context(Server("--steps", str(STEPS), "--json", workers=num_workers))
    workers = [processes.enter_context(Worker(folder, server.address, *options)) for _ in range(num_workers)]
    assert finish(*workers, server) == [0] * (num_workers + 1), complain(server, *workers)
    for worker in workers:
        check_weights(worker, alone)
        check_losses(worker, alone)
        assert (worker.found["status"], worker.found["joins"]) == ("completed", 1)
        assert worker.found["server_ended"] == f"{STEPS} steps were made"
    assert sorted(worker.found["worker_id"] for worker in workers) == list(range(num_workers))
    summary = json.loads(server.stdout.text)
    assert (summary["status"], summary["steps"], summary["refused"]) == ("completed", STEPS, {})


@pytest.mark.exhaustive
def test_a_worker_of_another_seed_takes_the_first_ones_weights(processes, folder, alone):
    """Data is the same for all seeds here, as it is not shuffled."""
    server = processes.enter_context(Server("--steps", str(STEPS), workers=2))
    first = processes.enter_context(Worker(folder, server.address))
    server.wait_for_joins(1)
    second = processes.enter_context(Worker(folder, server.address, "--set", "train.seed=5"))
    assert finish(first, second, server) == [0, 0, 0], complain(server, first, second)
    check_weights(first, alone)
    check_weights(second, alone)


@pytest.mark.exhaustive
def test_a_worker_that_comes_late(processes, folder, alone):
    gate = Gate(folder, step=3)
    server = processes.enter_context(Server("--steps", str(STEPS), workers=1))
    first = processes.enter_context(Worker(folder, server.address, **gate.environment))
    gate.reached()
    late = processes.enter_context(Worker(folder, server.address))
    server.wait_for_joins(2)
    gate.open()
    assert finish(first, late, server) == [0, 0, 0], complain(server, first, late)
    assert late.found["first_step"] > 0
    for worker in (first, late):
        check_weights(worker, alone)
        check_losses(worker, alone)


@pytest.mark.exhaustive
def test_a_server_that_ends_by_itself_when_its_workers_have_made_all_their_steps(processes, folder, alone):
    server = processes.enter_context(Server(workers=2))
    workers = [processes.enter_context(Worker(folder, server.address)) for _ in range(2)]
    assert finish(*workers, server) == [0, 0, 0], complain(server, *workers)
    for worker in workers:
        check_weights(worker, alone)
    assert "completed: all workers have left" in server.stdout.text


@pytest.mark.exhaustive
def test_over_tls_with_a_token_and_watched(processes, folder, alone, tmp_path):
    authority, token = trustme.CA(), tmp_path / "token"
    certificate = authority.issue_cert("127.0.0.1")
    certificate.private_key_and_cert_chain_pem.write_to_path(tmp_path / "server.pem")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    token.write_text("what only this run knows\n")
    token.chmod(0o600)
    pem, tls = str(tmp_path / "server.pem"), ("--tls-ca", str(tmp_path / "ca.pem"))
    gate = Gate(folder, step=STEPS - 1)
    server = processes.enter_context(
        Server(
            *("--steps", str(STEPS), "--token-file", str(token), "--tls-cert", pem, "--tls-key", pem),
            *("--metrics-port", "0", "--compression"),
            workers=2,
        )
    )
    url = server.stderr.wait_for(r"^metrics: (\S+)$")[1]
    first = processes.enter_context(Worker(folder, server.address, "--token-file", str(token), *tls))
    second = processes.enter_context(
        Worker(folder, server.address, "--token-file", str(token), *tls, **gate.environment)
    )
    gate.reached()
    page = urllib.request.urlopen(url, timeout=SECONDS).read().decode()
    assert 'parallel3d_gradient_server_connections{version="2"} 2.0' in page
    assert "parallel3d_gradient_server_workers 2.0" in page
    gate.open()
    assert finish(first, second, server) == [0, 0, 0], complain(server, first, second)
    check_weights(first, alone)
    check_weights(second, alone)


# Somebody is lost.


def test_a_server_that_is_killed_and_started_again(processes, folder, alone):
    """While one worker computes and the other has sent what it has."""
    gate = Gate(folder, step=3)
    server = processes.enter_context(Server("--steps", str(STEPS), workers=2))
    workers = [
        processes.enter_context(Worker(folder, server.address, **environment)) for environment in (gate.environment, {})
    ]
    gate.reached()
    server.process.kill()
    server.process.wait()
    again = processes.enter_context(Server("--steps", str(STEPS), workers=2, bind=server.address))
    again.wait_for_joins(2)
    gate.open()
    assert finish(*workers, again) == [0, 0, 0], complain(server, again, *workers)
    for worker in workers:
        check_weights(worker, alone)
        check_losses(worker, alone)
        assert worker.found["joins"] == 2


@pytest.mark.exhaustive
def test_a_worker_that_is_killed(processes, folder, alone):
    gate = Gate(folder, step=3)
    server = processes.enter_context(Server("--steps", str(STEPS), "--rejoin-seconds", "0.1", workers=2))
    victim = processes.enter_context(Worker(folder, server.address, **gate.environment))
    left = processes.enter_context(Worker(folder, server.address))
    gate.reached()
    victim.process.kill()
    assert finish(left, server) == [0, 0], complain(server, left)
    check_weights(left, alone)
    check_losses(left, alone)


SIGNALS = [
    pytest.param(signal.SIGINT, 130, marks=pytest.mark.exhaustive),
    pytest.param(signal.SIGTERM, 143, marks=pytest.mark.exhaustive),
]


@pytest.mark.parametrize(("number", "code"), SIGNALS)
@pytest.mark.parametrize("times", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_a_worker_that_is_told_to_stop(processes, folder, alone, number, code, times):
    """After its step; told twice, at once. Others go on without a wait, for it says that it leaves."""
    gate = Gate(folder, step=3)
    server = processes.enter_context(Server("--steps", str(STEPS), "--rejoin-seconds", "60", workers=2))
    stopped = processes.enter_context(Worker(folder, server.address, **gate.environment))
    left = processes.enter_context(Worker(folder, server.address))
    gate.reached()
    for _ in range(times):
        stopped.send(number)
    gate.open()
    assert stopped.finish() == code, stopped.stderr.text
    assert stopped.found["status"] == "interrupted"
    assert finish(left, server) == [0, 0], complain(server, left)
    check_weights(left, alone)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.exhaustive)]
)
def test_a_server_that_is_told_to_stop(processes, folder, number, code):
    gate = Gate(folder, step=3)
    server = processes.enter_context(Server("--json", workers=2))
    workers = [
        processes.enter_context(Worker(folder, server.address, **environment)) for environment in (gate.environment, {})
    ]
    gate.reached()
    server.send(number)
    assert server.finish() == code, server.stderr.text
    assert json.loads(server.stdout.text)["status"] == "interrupted"
    gate.open()
    assert finish(*workers) == [0, 0], complain(*workers)
    assert workers[0].found["steps"] == workers[1].found["steps"] in (2, 3)
    for worker in workers:
        assert worker.found["status"] == "stopped"
        assert worker.found["server_ended"] == f"the server was told to stop by {number.name}"


def test_a_server_that_is_told_twice_waits_for_nobody(processes):
    """Told once, it tells its worker and waits until that hangs up, which this one never does."""
    server = processes.enter_context(Server("--json", workers=1))
    host, _, port = server.address.rpartition(":")
    worker = processes.enter_context(socket.create_connection((host, int(port)), SECONDS))
    worker.sendall(frame(1, text("old"), struct.pack("<I", 1), text("cpu")))
    server.wait_for_joins(1)
    server.send(signal.SIGTERM)
    with worker.makefile("rb") as answers:
        assert answers.read().endswith(frame(7)), "it was told, and nothing after that"
    assert server.process.poll() is None
    server.send(signal.SIGINT)
    assert server.finish(CLOSE_SECONDS / 2) == 143, "by the first"
    found = json.loads(server.stdout.text)
    assert (found["status"], found["reason"]) == ("interrupted", "the server was told to stop by SIGTERM")


# What is refused.


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ("--set", "parallel.dp=2", "--set", "train.batch_size=8"),
            "parallel.dp = 2: the server's workers are the replicas.",
        ),
        (("--set", "parallel.pp=2"), "parallel.pp = 2: a worker is one process."),
        (("--token-file", "nothing"), "nothing: the token can't be read: No such file"),
        (("--tls-ca", "run.yaml"), "--tls-ca run.yaml: no certificate can be read"),
    ],
)
def test_a_worker_that_is_configured_wrongly(processes, folder, options, words):
    worker = processes.enter_context(Worker(folder, "127.0.0.1:1", *options))
    assert worker.finish() == 3, worker.stderr.text
    assert words in worker.stderr.text
    assert worker.stdout.text == ""


@pytest.mark.exhaustive
def test_other_sizes_than_the_servers(processes, folder):
    server = processes.enter_context(Server(workers=1))
    worker = processes.enter_context(Worker(folder, server.address, "--set", "train.batch_size=6"))
    assert worker.finish() == 3, worker.stderr.text
    assert "train.batch_size = 6: the server's steps have 7 samples.\n" in worker.stderr.text
    assert "Set it to 7, or start the server with --samples 6." in worker.stderr.text
    assert server.finish() == 0, "its only worker has left in order"


def test_a_worker_without_a_server(processes, folder):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    worker = processes.enter_context(Worker(folder, address, "--give-up", "0.2"))
    assert worker.finish() == 4, worker.stderr.text
    assert f"PeerLost: the gradient server at {address} was not there for 0.2 s" in worker.found["error"]
    assert worker.found["status"] == "failed"


@pytest.mark.exhaustive
def test_a_worker_with_another_token(processes, folder, tmp_path):
    for name in ("one", "other"):
        (tmp_path / name).write_text(f"a token that is {name} of two")
        (tmp_path / name).chmod(0o600)
    server = processes.enter_context(Server("--token-file", str(tmp_path / "one"), workers=1))
    worker = processes.enter_context(Worker(folder, server.address, "--token-file", str(tmp_path / "other")))
    assert worker.finish() == 4, worker.stderr.text
    assert "bad_token" in worker.found["error"]
    server.send(signal.SIGTERM)
    assert server.finish() == 143


@pytest.mark.exhaustive
def test_gradients_that_are_not_finite_halt_the_run(processes, folder):
    server = processes.enter_context(Server("--json", workers=2))
    workers = [
        processes.enter_context(Worker(folder, server.address, "--set", f"model.loss=own:{loss}"))
        for loss in ("plain", "infinite")
    ]
    assert finish(*workers, server) == [4, 4, 4], complain(server, *workers)
    for worker in workers:
        assert "not_finite" in worker.found["error"]
    assert "not_finite" in json.loads(server.stdout.text)["error"]


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (("--bind", "0.0.0.0:0"), 3, "other hosts can reach it, so it needs a token. Give --token-file."),
        (("--bind", "nonsense:x"), 3, "--bind 'nonsense:x' is no address"),
        (("--samples", "1"), 3, "samples = 1: at least 2."),
        (("--tls-cert", "a.pem"), 3, "--tls-cert and --tls-key belong together"),
        (("--tls-cert", "a.pem", "--tls-key", "a.pem"), 3, "no pair that can be used: No such file"),
        (("--join-seconds", "0.2"), 4, "0 of 2 workers joined within 0.2 s."),
        (("--workers", "many"), 2, "Invalid value for '--workers'"),
    ],
)
def test_a_server_that_can_not_be(processes, options, code, words):
    basis = ("--bind", "127.0.0.1:0", "--workers", "2", "--samples", "8")
    server = processes.enter_context(Started("-m", "parallel3d", "serve-gradients", *basis, *options, COLUMNS="200"))
    assert server.finish() == code, server.stderr.text
    assert words in server.stderr.text
    assert "Traceback" not in server.stderr.text


def test_a_port_that_is_taken(processes):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        command = ("-m", "parallel3d", "serve-gradients", "--bind", address, "--workers", "1", "--samples", "1")
        server = processes.enter_context(Started(*command))
        assert server.finish() == 1
    assert f"{address} cannot be listened on" in server.stderr.text


# What the server is, and how others use it.


def test_a_server_has_no_torch(processes):
    server = processes.enter_context(Server(workers=1))
    assert "torch" not in Path(f"/proc/{server.process.pid}/maps").read_text()
    server.send(signal.SIGINT)
    assert server.finish() == 130


@pytest.mark.exhaustive
def test_the_example(processes):
    server = processes.enter_context(Server("--steps", "41", workers=2))
    script = str(ROOT / "examples" / "gradient_worker.py")
    workers = [processes.enter_context(Started(script, server.address, OMP_NUM_THREADS="1")) for _ in range(2)]
    assert finish(*workers, server) == [0, 0, 0], complain(server, *workers)
    first, second = ([line.split("loss of all ")[-1] for line in each.stdout.text.splitlines()] for each in workers)
    assert first == second, "the losses, and the sum of the weights"
    assert len(first) == 4
    assert float(first[2]) < float(first[0])
