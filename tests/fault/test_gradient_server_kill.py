"""Workers and the gradient server die in each phase, freeze and come back: every sample still counts exactly once."""

from __future__ import annotations

import random
import signal
import socket
import threading
from contextlib import closing

import numpy
import pytest

from parallel3d import PeerLost
from runtime.gradient_server.wire.messages import (
    AveragedGradient,
    GradientPayload,
    Heartbeat,
    JoinAccepted,
    JoinRequest,
    Kind,
    Message,
    ShardAssignment,
    Shutdown,
    decode,
    encode,
)
from tests.support.gradient_problem import CLOSE, Size, Weights, alone
from tests.support.gradient_run import PLAIN, Applied, Loaded, Manner, Process, Received, Run, Stepped, Taken
from tests.support.processes import SECONDS
from tests.support.wire_faults import Point

pytestmark = pytest.mark.slow

STEPS = 6
WHEN = 2  # the step in which it happens
LATER = 60.0  # seconds that it is waited for, which is longer than it takes
SOON = 0.2  # seconds after which a lost worker's samples are shared among the others

WAITS = (("compute", WHEN),)
COMPUTING = Point("call", "compute", step=WHEN)
RECEIVED = Point("call", "received", step=WHEN)


def sends(name: str, moment: str, kind: Kind | None = None, number: int = 1, step: int | None = WHEN) -> Point:
    return Point("out", name, moment, step, kind, number)


def hears(name: str, moment: str, kind: Kind | None = None, number: int = 1, step: int | None = WHEN) -> Point:
    return Point("in", name, moment, step, kind, number)


BEFORE_THE_AVERAGE = {
    "while it computes": COMPUTING,
    "before its gradient's first byte": sends("Table", "before", Kind.GRADIENT),
    "in the midst of its table": sends("Table", "middle", Kind.GRADIENT),
    "in the midst of its first chunk": sends("Chunk", "middle", Kind.GRADIENT),
    "in the midst of a later chunk": sends("Chunk", "middle", Kind.GRADIENT, 4),
    "between two chunks": sends("Chunk", "after", Kind.GRADIENT, 2),
    "in the midst of its last words": sends("GradientDone", "middle"),
    "after its gradient": sends("GradientDone", "after"),
}
"""Others wait meanwhile, so that there can be none yet."""
SINCE_THE_AVERAGE = {
    "before the average's first byte": hears("Table", "before", Kind.AVERAGE),
    "while the average comes": hears("Chunk", "middle", Kind.AVERAGE, 2),
    "before the average's last word": hears("AverageDone", "before"),
    "between receiving and applying": RECEIVED,
}
WORKER_POINTS = BEFORE_THE_AVERAGE | SINCE_THE_AVERAGE

JOINING = {
    "after its first word": sends("Hello", "after", step=None),
    "in the midst of its first word": sends("Hello", "middle", step=None),
    "in the midst of its proof": sends("Proof", "middle", step=None),
    "when it is welcome": hears("Welcome", "before", step=None),
    "while it waits for weights": hears("Table", "before", Kind.STATE, step=None),
    "while weights come": hears("Chunk", "middle", Kind.STATE, 3, step=None),
    "before it loads them": hears("StateDone", "before", step=None),
}

SERVER_POINTS = {
    "while a worker joins": hears("Proof", "before", number=2, step=None),
    "while it hands weights on": hears("Chunk", "middle", Kind.STATE, 3, step=0),
    "between two assignments": sends("Assignment", "before", number=2),
    "in the midst of a gradient": hears("Chunk", "middle", Kind.GRADIENT, 3),
    "before the last gradient's last word": hears("GradientDone", "before", number=2),
    "before the first reply": sends("Table", "before", Kind.AVERAGE),
    "in the midst of an average": sends("Chunk", "middle", Kind.AVERAGE, 3),
    "before the first last word": sends("AverageDone", "before"),
    "in the midst of the first last word": sends("AverageDone", "middle"),
    "between replies to two workers": sends("AverageDone", "before", number=2),
    "after all replies": sends("AverageDone", "after", number=2),
    "when a step is done": Point("call", "step", step=WHEN),
    "between two steps": sends("Assignment", "before", step=WHEN + 1),
}
MAY_BE_UNTOLD = ("between replies to two workers", "after all replies")
"""A worker has the average, so the step is not made again; but where replies wait for nothing, the server dies with the
last one, before it has told of the step."""


# The means.


def test_a_sample_too_many_or_too_few_would_show():
    *_, expected = zip(range(STEPS), alone("a", 13), strict=False)
    for start, end in [(0, 12), (1, 13)]:
        weights = Weights("a")
        for step in range(STEPS - 1):
            weights.apply(weights.gradient(step, start, end) if step == WHEN else weights.gradient(step, 0, 13))
        assert numpy.abs(numpy.subtract(weights.probe(), expected[1].probe())).max() > 1000 * CLOSE


def test_nothing_happens():
    with Run(3, steps=STEPS) as run:
        run.start(dict.fromkeys("abv", Manner()))
        found = run.finish()
        assert [step.step for step in found.steps] == list(range(STEPS))
        assert found.shares[0] == {0: (0, 4), 1: (4, 8), 2: (8, 13)}


# A worker dies.


@pytest.mark.parametrize("is_replaced", [False, True], ids=["for good", "and is replaced"])
@pytest.mark.parametrize("when", WORKER_POINTS)
def test_a_worker_is_killed(when, is_replaced):
    others_wait = when in BEFORE_THE_AVERAGE
    with Run(3, steps=STEPS, rejoin_seconds=LATER if is_replaced else SOON) as run:
        manners = {"a": Manner(holds=WAITS if others_wait else ()), "b": Manner(), "v": Manner(WORKER_POINTS[when])}
        _, workers = run.start(manners)
        workers["v"].dies()
        if is_replaced:
            run.start_worker("v")
        if others_wait:
            workers["a"].go_on()
        found = run.finish()
        assert [step.step for step in found.steps] == list(range(STEPS))
        assert len(found.shares[STEPS - 1]) == (3 if is_replaced else 2)


@pytest.mark.parametrize("is_replaced", [False, True], ids=["for good", "and is replaced"])
@pytest.mark.parametrize("when", JOINING)
def test_a_worker_is_killed_while_it_joins(when, is_replaced):
    with Run(2, steps=STEPS, rejoin_seconds=SOON) as run:
        _, workers = run.start({"a": Manner(holds=(("compute", WHEN), ("compute", WHEN + 2))), "b": Manner()})
        victim = run.start_worker("v", Manner(JOINING[when]), waits=False)
        if has_joined := victim.joins():
            workers["a"].go_on()
        victim.dies()
        if not has_joined:
            workers["a"].go_on()
        if is_replaced:
            run.start_worker("v")
        workers["a"].go_on()
        found = run.finish()
        assert [step.step for step in found.steps] == list(range(STEPS))
        assert len(found.shares[STEPS - 1]) == (3 if is_replaced else 2)


@pytest.mark.parametrize("is_replaced", [False, True], ids=["for good", "and is replaced"])
@pytest.mark.parametrize("moment", ["before", "middle", "after"])
def test_a_worker_is_killed_while_it_gives_everybody_its_first_weights(moment, is_replaced):
    with Run(3, steps=STEPS, rejoin_seconds=SOON) as run:
        point = sends("Chunk", moment, Kind.STATE, 5, step=0)
        _, workers = run.start({"v": Manner(point), "a": Manner(holds=WAITS), "b": Manner()})
        workers["v"].dies()
        if is_replaced:
            run.start_worker("v")
        workers["a"].go_on()
        found = run.finish()
        assert [step.step for step in found.steps] == list(range(STEPS))
        assert len(found.shares[STEPS - 1]) == (3 if is_replaced else 2)


@pytest.mark.parametrize("moment", ["before", "middle", "after"])
@pytest.mark.parametrize("name", ["Table", "Chunk", "StateDone"])
def test_a_worker_is_killed_while_it_gives_its_weights_to_one_that_is_late(name, moment):
    with Run(2, steps=STEPS, rejoin_seconds=SOON) as run:
        point = sends(name, moment, Kind.STATE if name != "StateDone" else None, step=WHEN + 1)
        _, workers = run.start({"v": Manner(point, holds=WAITS), "a": Manner()})
        late = run.start_worker("c")
        workers["v"].go_on()
        workers["v"].dies()
        found = run.finish()
        assert late.until_step(Loaded, WHEN + 1).step == WHEN + 1
        assert len(found.shares[STEPS - 1]) == 2


# The server dies.


@pytest.mark.parametrize("when", SERVER_POINTS)
def test_the_server_is_killed_and_started_again(when):
    with Run(2, steps=STEPS) as run:
        server = run.start_server(SERVER_POINTS[when])
        run.start_worker("a", waits=False)
        run.start_worker("b", waits=False)
        server.dies()
        run.start_server()
        found = run.finish()
        told = {step.step for step in found.steps}
        assert told | ({WHEN} if when in MAY_BE_UNTOLD else set()) == set(range(STEPS))


def test_one_has_the_average_when_the_server_dies_and_the_other_is_given_its_weights():
    with Run(2, steps=STEPS) as run:
        server, workers = run.start(dict.fromkeys("ab", Manner()), SERVER_POINTS["between replies to two workers"])
        server.dies()
        run.start_server()
        found = run.finish()
        loaded = [
            word for each in workers.values() for word in each.words if isinstance(word, Loaded) and word.step > 0
        ]
        assert [word.step for word in loaded] == [WHEN + 1]
        assert [step.step for step in found.steps].count(WHEN) <= 1


def test_the_server_dies_with_the_only_worker_that_had_the_average():
    """So that the step is made anew."""
    with Run(2, steps=STEPS) as run:
        manners = dict.fromkeys("ab", Manner(holds=(("received", WHEN),)))
        server, workers = run.start(manners, SERVER_POINTS["between replies to two workers"])
        server.dies()
        run.wait_for(lambda: any(has_received(worker) for worker in workers.values()))
        (victim,) = [name for name, worker in workers.items() if has_received(worker)]
        workers[victim].send(signal.SIGKILL)
        workers[victim].dies()
        run.start_server()
        run.start_worker(victim)
        for name in workers.keys() - {victim}:
            workers[name].go_on()
        found = run.finish()
        assert [step.step for step in found.steps].count(WHEN) == 2  # of which one was lost with those who knew of it


def has_received(worker: Process) -> bool:
    return Received(WHEN) in worker.words


# Freezing, and coming back.


def free_run(**settings: object) -> Run:
    """One that goes on until it is stopped, of steps that are small."""
    return Run(**{"num_workers": 3, "size": Size(400, 200), "rejoin_seconds": SOON, **settings})


def takes_part_again(run: Run, victim: Process) -> None:
    """It is given weights and makes steps; then all is well."""
    loaded = victim.until_step(Loaded, WHEN + 1)
    victim.until_step(Applied, loaded.step + 3)
    run.servers[-1].go_on()
    found = run.finish()
    assert len(found.shares[loaded.step + 2]) == 3


@pytest.mark.parametrize("place", ["compute", "received"])
def test_a_worker_is_frozen_for_longer_than_it_is_waited_for(place):
    with free_run(heartbeat_seconds=0.2, timeout_seconds=1.0) as run:
        server, workers = run.start({"a": Manner(), "b": Manner(), "v": Manner(holds=((place, WHEN),))})
        victim = workers["v"]
        victim.until_step(Taken if place == "compute" else Received, WHEN)
        victim.send(signal.SIGSTOP)
        server.until_step(Stepped, WHEN + 3)
        victim.send(signal.SIGCONT)
        victim.go_on()
        takes_part_again(run, victim)


def test_a_worker_computes_for_longer_than_it_is_waited_for():
    """Without letting its event loop run, so that it is not heard."""
    with free_run(heartbeat_seconds=0.2, timeout_seconds=1.0) as run:
        server, workers = run.start({"a": Manner(), "b": Manner(), "v": Manner(holds=WAITS, blocks=True)})
        server.until_step(Stepped, WHEN + 3)
        workers["v"].go_on()
        takes_part_again(run, workers["v"])


def test_a_worker_that_computes_for_long_and_is_heard_is_waited_for():
    with Run(3, steps=STEPS, heartbeat_seconds=0.1, timeout_seconds=1.0, rejoin_seconds=SOON) as run:
        _, workers = run.start({"a": Manner(), "b": Manner(), "v": Manner(holds=WAITS)})
        workers["v"].until_step(Taken, WHEN)
        threading.Event().wait(2.0)  # there is nothing to wait for: nothing shall happen
        workers["v"].go_on()
        found = run.finish()
        assert [step.attempt for step in found.steps] == [0] * STEPS
        assert all(len(step.shares) == 3 for step in found.steps)


def test_a_worker_comes_back_when_others_have_its_samples_already():
    with free_run() as run:
        server, workers = run.start({"a": Manner(), "b": Manner(), "v": Manner(COMPUTING)})
        workers["v"].dies()
        server.until_step(Stepped, WHEN + 3)
        takes_part_again(run, run.start_worker("v"))


@pytest.mark.parametrize("place", ["compute", "received"])
def test_the_server_is_killed_and_started_again_while_a_worker_is_frozen(place):
    """Which is still there when it goes on, at a step that the others have left long ago."""
    with free_run() as run:
        server, workers = run.start({"a": Manner(), "b": Manner(), "v": Manner(holds=((place, WHEN),))})
        victim = workers["v"]
        victim.until_step(Taken if place == "compute" else Received, WHEN)
        victim.send(signal.SIGSTOP)
        server.send(signal.SIGKILL)
        server.dies()
        run.start_server(workers=2).until_step(Stepped, WHEN + 3)
        victim.send(signal.SIGCONT)
        victim.go_on()
        takes_part_again(run, victim)


# Version 1, which cannot send again.


class VersionOne:
    """A worker of version 1 as the table of its messages has it."""

    def __init__(self, run: Run, name: str) -> None:
        self._socket = socket.create_connection(("127.0.0.1", run.settings.port), SECONDS)
        self.send(encode(JoinRequest(name, 1, "cpu")))
        accepted = self.hear()
        assert isinstance(accepted, JoinAccepted)
        self.worker = accepted.worker_id

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def hear(self) -> Message:
        """The next message; heartbeats may come at any time."""
        while isinstance(message := decode(self._take(int.from_bytes(self._take(4), "big"))), Heartbeat):
            pass
        return message

    def _take(self, num_bytes: int) -> bytes:
        data = b""
        while len(data) < num_bytes:
            piece = self._socket.recv(num_bytes - len(data))
            assert piece, "the server hung up"
            data += piece
        return data

    def gradient(self, share: Message) -> bytes:
        """All ones, as a whole frame."""
        assert isinstance(share, ShardAssignment)
        vector = numpy.ones(10_000, numpy.float32)
        return encode(GradientPayload(share.step, self.worker, vector, 1.0, 0, share.end - share.start))

    def close(self) -> None:
        self._socket.close()


@pytest.mark.parametrize("num_bytes", [0, 3, 20, 20_000, -1], ids=["before it", "length", "head", "vector", "tail"])
def test_a_worker_of_version_1_that_is_lost_ends_the_run_and_is_named(num_bytes):
    with Run(2, protocol="v1", steps=STEPS) as run:
        server = run.start_server()
        with closing(VersionOne(run, "first")) as first, closing(VersionOne(run, "second")) as second:
            first.send(first.gradient(first.hear()))
            second.send(second.gradient(second.hear())[:num_bytes])
            second.close()
            assert isinstance(first.hear(), Shutdown)
        with pytest.raises(PeerLost, match=r"worker 1 \(second\) was lost at step 0: ") as caught:
            server.ends()
        assert (caught.value.rank, caught.value.step) == (1, 0)
        assert ("within a message" in str(caught.value)) == (num_bytes != 0)


def test_a_worker_of_version_1_that_leaves_does_not():
    with Run(2, protocol="v1", steps=2) as run:
        server = run.start_server()
        with closing(VersionOne(run, "first")) as first, closing(VersionOne(run, "second")) as second:
            for each in (first, second):
                each.send(each.gradient(each.hear()))
            for each in (first, second):
                assert isinstance(each.hear(), AveragedGradient)
            assert isinstance(second.hear(), ShardAssignment)
            second.send(encode(Shutdown()))
            first.send(first.gradient(first.hear()))
            assert isinstance(first.hear(), AveragedGradient)
            assert isinstance(first.hear(), Shutdown)
        assert server.ends() == 0


# All of that, in any order.


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(8))
def test_whatever_happens(seed):
    chance = random.Random(seed)
    with Run(3, size=Size(4000, 2000), rejoin_seconds=SOON, heartbeat_seconds=0.2, timeout_seconds=1.5) as run:
        run.start(dict.fromkeys("abc", PLAIN))
        for _ in range(12):
            server = run.servers[-1]
            server.until_step(Stepped, server.last_step() + chance.randint(1, 20))
            something_happens(run, chance)
        server = run.servers[-1]
        server.until_step(Stepped, server.last_step() + 20)
        server.go_on()
        found = run.finish(began_with="a")
        assert len(found.steps) > 100


def something_happens(run: Run, chance: random.Random) -> None:
    """Never to all that know the latest weights: a server waits for those."""
    server, name = run.servers[-1], chance.choice("abc")
    victim = run.workers[name][-1]
    match chance.choice(("kill", "kill late", "freeze", "server", "server and worker", "server while frozen")):
        case "kill":
            kill(victim)
            run.start_worker(name)
        case "kill late":
            kill(victim)
            server.until_step(Stepped, server.last_step() + 3)
            run.start_worker(name)
        case "freeze":
            victim.send(signal.SIGSTOP)
            server.until_step(Stepped, server.last_step() + chance.randint(1, 5))
            victim.send(signal.SIGCONT)
        case "server":
            kill(server)
            run.start_server(workers=chance.randint(2, 3))
        case "server and worker":
            kill(server)
            kill(victim)
            run.start_server(workers=chance.randint(2, 3))
            run.start_worker(name)
        case "server while frozen":
            victim.send(signal.SIGSTOP)
            kill(server)
            run.start_server(workers=2).until_step(Stepped, server.last_step())
            victim.send(signal.SIGCONT)
    for each in run.workers.values():  # one that has no weights yet must not be among the only ones left
        each[-1].until_step(Applied, 0)


def kill(process: Process) -> None:
    process.send(signal.SIGKILL)
    process.dies()
