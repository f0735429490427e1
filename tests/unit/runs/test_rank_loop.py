"""A rank's part of a run, with ranks as tasks of one loop: what it reports, and that all ranks stop after one step."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
from base64 import b64decode
from collections.abc import Iterable
from typing import Any

import pytest
import torch

import parallel3d
from monitoring.analysis.facts import Status
from monitoring.events.events import Axis, Event, What, unpack
from monitoring.events.recorder import Recorder
from monitoring.messages import (
    ClockOffset,
    Collectives,
    DataQueue,
    Events,
    Joined,
    LoopLag,
    Memory,
    Message,
    Ready,
    RunStep,
)
from parallel3d.config import load_config
from parallel3d.planning.preflight import ModelFacts
from parallel3d.runs import rank_exchange
from parallel3d.runs.commands import Command
from parallel3d.runs.event_sender import EventSender
from parallel3d.runs.lifecycle import RunLifecycle
from parallel3d.runs.rank_exchange import CommandBroadcast, gather_json
from parallel3d.runs.rank_loop import TRACE_STEPS, LastSteps, SupervisorReporter, train, used_memory
from parallel3d.runs.record import RunRecord
from parallel3d.runs.torchrun_rank import RankReporter
from parallel3d.training.performance import TrainStep
from runtime.control import LauncherControl, RankControl
from runtime.cores import num_cores
from runtime.errors import NonFiniteGradient
from tests.support.observed import report
from tests.support.stand_in import STAND_IN, StandIn


def config_of(steps: int = 4, **overrides: Any):
    return load_config(None, overrides={"parallel.dp": 2, "train.steps": steps, **overrides}, environ={})


class Ear:
    """A reporter that keeps the messages, and gives commands after certain steps."""

    def __init__(self, commands: dict[int, Command]) -> None:
        self._commands, self.command, self.heard, self.is_behind = commands, Command(), [], False

    def send(self, kind: str, **fields: object) -> None:
        self.heard.append({"kind": kind, **json.loads(json.dumps(fields))})
        if kind == "step":
            self.command = self._commands.get(fields["step"], self.command)

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [message for message in self.heard if message["kind"] == kind]

    def events(self) -> list[Event]:
        return events_in(self.of("events"))

    def steps(self) -> list[int]:
        """Of which there was an event."""
        return [event.step for event in self.events() if event.what == What.STEP]


def events_in(messages: Iterable[dict[str, Any]]) -> list[Event]:
    return [event for message in messages for event in unpack(b64decode(message["data"]))]


async def trained(steps: int, commands: dict[int, Command]) -> list[Ear]:
    """Only rank 0's commands count; the other rank's is to stop at once."""

    async def main() -> Ear:
        async with StandIn(config_of(steps)) as coordinator:
            ear = Ear(commands)
            if coordinator.mesh.rank:
                ear.command = Command(99, stops=True)
            await train(coordinator, ear, LastSteps(coordinator.mesh, coordinator.recorder))
            return ear

    return await parallel3d.in_process(main, ranks=2)


async def test_every_rank_tells_of_every_step():
    first, second = await trained(4, {})
    for ear in (first, second):
        (ready,) = ear.of("ready")
        assert (ready["device"], ready["parameters"]) == ("cpu", 6)
        assert ear.of("memory")[-1]["bytes"] > 1 << 20
        assert ear.of("memory")[-1]["kinds"] == {"weights": 24, "gradients": 24, "optimizer": 48}
        assert ready["num_cores"] == num_cores()
        assert ear.of("clock") == [{"kind": "clock", "offset": 0.0}]
        assert ear.of("queue")[-1]["capacity"] == 2
    assert [message["loss"] for message in first.of("step")] == [10.0, 9.0, 8.0, 7.0]
    assert all(message["bandwidth"] > 0 for message in first.of("step"))
    assert [message["step"] for message in first.of("step")] == [0, 1, 2, 3]
    assert second.of("step") == [], "rank 0 speaks for all"
    record = RunRecord(config_of())
    for rank, ear in enumerate((first, second)):
        for message in ear.heard:
            report(record, rank, message)
    assert len(record.steps) == 4


async def test_the_events_of_every_step_are_told():
    for ear in await trained(30, {}):
        told = ear.events()
        for what in (What.F, What.B, What.STEP):
            assert [event.step for event in told if event.what == what] == list(range(30))
        assert {event.axis for event in told if event.what == What.COLLECTIVE} == {Axis.DP, Axis.WORLD}
        assert ear.of("events")[-1]["dropped"] == 0
        wholes = [event.seconds for event in told if event.what == What.STEP]
        assert [step["seconds"] for step in ear.of("step")] in ([], pytest.approx(wholes))


async def test_events_are_told_also_when_a_step_fails(monkeypatch):
    monkeypatch.setenv(STAND_IN, "raise 0 2")
    ears = []

    async def main() -> None:
        async with StandIn(config_of()) as coordinator:
            ears.append(Ear({}))
            await train(coordinator, ears[-1], LastSteps(coordinator.mesh, coordinator.recorder))

    with pytest.raises(ValueError, match="the model has an opinion"):
        await parallel3d.in_process(main, ranks=2)
    assert ears[0].steps() == [0, 1]


class Exploding(StandIn):
    """Of all ranks, each of which raises the same."""

    async def train_step(self, batch: int) -> TrainStep:
        if batch == 2:
            raise NonFiniteGradient("the norm of the gradients is nan", ranks=(1,))
        return await super().train_step(batch)


async def test_a_gradient_that_is_not_finite_is_told_by_rank_0():
    async def main() -> Ear:
        async with Exploding(config_of()) as coordinator:
            ear = Ear({})
            with pytest.raises(NonFiniteGradient):
                await train(coordinator, ear, LastSteps(coordinator.mesh, coordinator.recorder))
            return ear

    first, second = await parallel3d.in_process(main, ranks=2)
    assert (first.of("nonfinite"), second.of("nonfinite")) == ([{"kind": "nonfinite", "step": 2}], [])


async def test_all_ranks_stop_after_the_same_step():
    first, second = await trained(50, {4: Command(1, stops=True)})
    assert [ear.steps() for ear in (first, second)] == [list(range(6))] * 2, (
        "commanded after step 4, known to all in step 5"
    )
    assert first.of("applied") == [{"kind": "applied", "number": 1, "step": 6, "learning_rate": None}]
    assert second.of("applied") == []


async def test_a_learning_rate_counts_from_the_reported_step():
    commands = {1: Command(1, learning_rate=0.5), 4: Command(2), 6: Command(3, stops=True)}
    first, _ = await trained(50, commands)
    assert [(told["step"], told["learning_rate"]) for told in first.of("applied")] == [(3, 0.5), (6, None), (8, None)]
    rates = [message["learning_rate"] for message in first.of("step")]
    assert rates == [3e-4] * 3 + [0.5] * 3 + [3e-4] * 2


async def test_commands_of_one_rank_need_no_exchange():
    async def main() -> list[Command]:
        async with parallel3d.mesh() as mesh:
            broadcast = CommandBroadcast(mesh)
            found = []
            for command in (Command(), Command(1, learning_rate=0.1), Command(2, True, 0.1)):
                broadcast.begin(command)
                found.append(await broadcast.end())
            return found

    assert await parallel3d.in_process(main, ranks=1) == [
        [Command(), Command(1, learning_rate=0.1), Command(2, True, 0.1)]
    ]


async def test_the_last_steps_are_kept():
    async def main() -> list[str]:
        async with StandIn(config_of(9)) as coordinator:
            last = LastSteps(coordinator.mesh, coordinator.recorder)
            assert list(last.spans()) == []
            await train(coordinator, Ear({}), last)
            return [span.name for span in last.spans()]

    names = (await parallel3d.in_process(main, ranks=2))[0]
    assert [name for name in names if name.startswith("step")] == [f"step {step}" for step in range(9 - TRACE_STEPS, 9)]
    assert names.count("0F0") == names.count("0B0") == TRACE_STEPS
    assert {"all_reduce dp", "broadcast world"} <= set(names)


def test_memory_is_what_the_kernel_says():
    assert used_memory(torch.device("cpu")) > 1 << 20


# The supervisor at the other end of the control channel.


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield LauncherControl(ours), RankControl(theirs.fileno())


async def a_turn_of_the_loop() -> None:
    """What has arrived is read then."""
    for _ in range(3):
        await asyncio.sleep(0)


async def test_commands_of_the_supervisor_are_received(pair):
    launcher, rank = pair
    reporter = SupervisorReporter(rank)
    launcher.send("command", number=1, stops=False, learning_rate=0.5)
    launcher.send("command", number="x")
    launcher.send("command", number=2, stops=True, learning_rate=None)
    await a_turn_of_the_loop()
    assert reporter.command == Command(2, True, None)
    await reporter.close()


async def test_a_supervisor_that_is_gone_is_no_trouble(pair):
    launcher, rank = pair
    reporter = SupervisorReporter(rank)
    launcher.connection.close()
    await a_turn_of_the_loop()
    assert not rank.is_open
    assert reporter.command == Command()
    asyncio.get_running_loop().remove_reader(rank.fd)


async def test_a_busy_supervisor_misses_no_step(pair):
    launcher, rank = pair
    reporter = SupervisorReporter(rank)
    for step in range(3000):
        reporter.send("step", step=step, text="x" * 300)
    assert rank.dropped
    closing = asyncio.create_task(reporter.close())
    heard: list[int] = []
    while not closing.done():
        heard += [message["step"] for message in launcher.messages()]
        await asyncio.sleep(0)
    heard += [message["step"] for message in launcher.messages(at_most=3000)]
    assert heard == list(range(3000))


async def test_a_supervisor_that_hears_nothing_costs_the_oldest_events_and_no_step(pair):
    launcher, rank = pair
    reporter, recorder = SupervisorReporter(rank), Recorder(1000)
    sender = EventSender(recorder, reporter, lambda: True)
    for step in range(20_000):
        recorder.record(What.STEP, step, 1.0, 2.0)
        if step % 50 == 0:
            sender.send_some()
    assert len(reporter._unsent) <= 4, "what was taken waits, the rest stays in the ring"
    sender.stop()
    closing = asyncio.create_task(reporter.close())
    heard: list[dict[str, Any]] = []
    while not closing.done():
        heard += launcher.messages()
        await asyncio.sleep(0)
    heard += launcher.messages(at_most=1000)
    told = [event.step for event in events_in(heard)]
    assert told == sorted(set(told))
    assert (told[0], told[-1]) == (0, 19_999)
    assert len(told) + heard[-1]["dropped"] == 20_000
    assert heard[-1]["dropped"] > 0


# Ranks without a supervisor.


class Watch:
    """A monitor that keeps what it is given, or fails over it."""

    def __init__(self, *, fails: bool = False) -> None:
        self.taken: dict[int, list[Message | None]] = {}
        self.ends: list[str] = []
        self._fails = fails

    def take(self, rank: int, message: Message | None) -> None:
        self.taken.setdefault(rank, []).append(message)
        if self._fails:
            raise RuntimeError("nobody is here")

    async def settle(self) -> None:
        self.ends.append("settled")

    async def linger(self, hurry: asyncio.Event) -> None:
        self.ends.append("lingered")

    async def close(self) -> None:
        self.ends.append("closed")

    def steps(self, rank: int) -> list[int]:
        reports = (message for message in self.taken[rank] if isinstance(message, Events))
        return [event.step for each in reports for event in each.unpack(0.0) if event.what == What.STEP]


async def test_json_of_every_rank_on_every_rank():
    async def main() -> list[Any]:
        async with parallel3d.mesh(dp=3) as mesh:
            return list(await gather_json(mesh.world, {"rank": mesh.rank, "text": "ä" * mesh.rank}))

    expected = [{"rank": rank, "text": "ä" * rank} for rank in range(3)]
    assert await parallel3d.in_process(main, ranks=3) == [expected] * 3


@pytest.fixture
def shown() -> list[int]:
    """The steps that rank 0 shows."""
    return []


@pytest.fixture
def first(tmp_path, monkeypatch, shown) -> RunLifecycle:
    """Rank 0's."""
    monkeypatch.chdir(tmp_path)
    lifecycle = RunLifecycle(config_of(), on_step=lambda step: shown.append(step.step))
    lifecycle.record.facts = ModelFacts(5)
    lifecycle.create_folder()
    return lifecycle


async def work(first: RunLifecycle, make: type[StandIn] = StandIn) -> None:
    lifecycles = enumerate((first, RunLifecycle(config_of())))

    async def main() -> None:
        rank, lifecycle = next(lifecycles)
        await RankReporter(rank, lifecycle).work(make)

    await parallel3d.in_process(main, ranks=2)


async def test_rank_0_gathers_all_reports(first, shown):
    folder = first.folder
    await work(first)
    assert shown == [0, 1, 2, 3]
    assert first.record.status is Status.COMPLETED
    metrics = json.loads((folder.path / "metrics.json").read_text())
    assert (metrics["status"], metrics["losses"]) == ("completed", [10.0, 9.0, 8.0, 7.0])
    assert [rank["coords"]["dp"] for rank in metrics["ranks"]] == [0, 1]
    assert all(rank["memory_bytes"] and sum(rank["seconds"].values()) for rank in metrics["ranks"])
    trace = json.loads(gzip.decompress((folder.path / "trace.json.gz").read_bytes()))["traceEvents"]
    assert {event["pid"] for event in trace} == {0, 1}
    kinds = [json.loads(line)["kind"] for line in (folder.path / "events.jsonl").read_text().splitlines()]
    assert kinds.count("step") == kinds.count("parts") == 4


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("interval", [0.0, 60.0], ids=["beside each step", "at the end"])
async def test_rank_0s_monitor_gets_all_messages(first, monkeypatch, fails, interval):
    monkeypatch.setattr(rank_exchange, "INTERVAL", interval)
    watch = Watch(fails=fails)
    first.start_monitor = lambda: setattr(first, "_monitor", watch)
    await work(first)
    assert first.record.status is Status.COMPLETED
    assert watch.ends == ["settled", "lingered", "closed"]
    for rank, alone in ((0, {RunStep}), (1, set())):
        expected = {Joined, ClockOffset, Ready, Events, Memory, DataQueue} | alone
        totals = {LoopLag, Collectives} if interval == 0 else set()
        assert {type(message) for message in watch.taken[rank]} == expected | totals
        assert watch.steps(rank) == [0, 1, 2, 3]


async def test_without_a_supervisor_the_rank_with_such_a_gradient_is_named(first):
    folder = first.folder
    with pytest.raises(NonFiniteGradient):
        await work(first, Exploding)
    error = json.loads((folder.path / "metrics.json").read_text())["error"]
    assert (error["rank"], error["coords"]) == (1, {"dp": 1, "tp": 0, "pp": 0})
    assert error["message"].startswith("rank 1 (dp=1 tp=0 pp=0) failed: NonFiniteGradient: ")


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_failed_rank_without_a_supervisor(first, monkeypatch, rank):
    monkeypatch.setenv(STAND_IN, f"raise {rank} 2")
    folder = first.folder
    with pytest.raises(Exception, match="the model has an opinion"):
        await work(first)
    metrics = json.loads((folder.path / "metrics.json").read_text())
    assert metrics["steps"] == 2
    # A task's error cancels the others of one loop; ranks that are processes hear of it as PeerLost.
    assert metrics["status"] == ("failed" if rank == 0 else metrics["status"])
    assert rank == 1 or metrics["error"]["notes"] == ["Layer 3 of the model has it."]
    assert (folder.path / "report.html").exists()
