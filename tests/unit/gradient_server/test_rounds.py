"""What a gradient server decides, without sockets: events in, instructions out."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from runtime.errors import DeadlineExceeded, Mismatch, PeerLost
from runtime.gradient_server.events import (
    Average,
    Dismiss,
    Finish,
    Joined,
    Left,
    Lost,
    Misbehaved,
    Open,
    Relay,
    Reported,
    SetTimer,
    Started,
    StateSent,
    StopAsked,
    Summed,
    TimerFired,
)
from runtime.gradient_server.rounds import MOST_RETURNS, Phase, Rounds
from runtime.gradient_server.settings import GradientServerSettings
from runtime.gradient_server.step_sum import WHOLE, Plan, part
from runtime.gradient_server.wire.messages import Reason, WireError
from tests.support.gradient_clients import floats

BAD = WireError(Reason.NOT_FINITE, "part 0.")


class Game:
    """A run, and the instructions of the latest event."""

    def __init__(self, workers=2, samples=8, **options) -> None:
        settings = {"workers": workers, "samples": samples, "step_seconds": None, **options}
        self.rounds = Rounds(GradientServerSettings(**settings))
        self.now = 0.0
        self.told: list = []
        self.handle(Started())

    def handle(self, event):
        self.told = self.rounds.handle(event, self.now)
        return self.told

    def join(self, name, version=2, step=0, has_state=False):
        assert self.rounds.refusal(name, version) is None
        member = self.rounds.roster.admit(name, version, step, has_state)
        self.handle(Joined(member.worker))
        return member.worker

    def fire(self, *held_up_by):
        """The latest timer."""
        return self.handle(TimerFired(self.rounds._timer, held_up_by))

    def send(self, worker, value=1.0):
        """A worker's gradient, in the way of its version."""
        total, member = self.rounds.sum, self.rounds.roster.members[worker]
        key, plan = (WHOLE, Plan("whole")) if member.version == 1 else (part(0), Plan("parts", 1))
        total.settle(worker, plan)
        total.begin(worker, key, 1)
        total.add(worker, key, 0, floats(value))
        total.end(worker, key)
        total.report(worker, value, 0, total.shares[worker].length)
        return self.handle(Reported(worker))

    def step(self):
        for worker in list(self.rounds.sum.shares):
            self.send(worker)
        return self.handle(Summed())

    def only(self, kind):
        (found,) = [each for each in self.told if isinstance(each, kind)]
        return found

    @property
    def opened(self):
        total = self.only(Open).sum
        return total.step, total.attempt, {worker: tuple(share) for worker, share in total.shares.items()}


def started(count=2, **options):
    """All have joined, and have the first one's state."""
    game = Game(workers=count, **options)
    for number in range(count):
        game.join(f"node-{number}")
    if count > 1:
        game.handle(StateSent(game.only(Relay).request))
    return game


def test_all_fresh_workers_get_the_first_ones_state():
    game = Game(3)
    assert [type(each) for each in game.told] == [SetTimer]
    game.join("a")
    game.join("b")
    assert game.told == []
    game.join("c")
    assert game.told == [Relay(0, (1, 2), 0, 1)]
    game.handle(StateSent(1))
    assert game.opened == (0, 0, {0: (0, 2), 1: (2, 4), 2: (4, 8)})


def test_version_1_begins_at_once():
    game = Game(2)
    game.join("same", 1)
    game.join("same", 1)
    assert game.opened == (0, 0, {0: (0, 4), 1: (4, 8)})


def test_a_step_follows_the_other():
    game = started()
    game.step()
    assert game.opened == (1, 0, {0: (0, 4), 1: (4, 8)})
    assert game.rounds.num_steps == 1


def test_it_ends_after_its_steps():
    game = started(steps=1)
    game.step()
    assert game.told == [Finish("1 steps were made")]
    assert game.handle(Joined(0)) == []


def test_a_timer_of_another_time_means_nothing():
    game = started()
    assert game.handle(TimerFired(1)) == []
    assert game.rounds.phase is Phase.ROUND


def test_nobody_comes():
    game = Game(2)
    game.fire()
    assert isinstance(game.only(Finish).error, DeadlineExceeded)
    assert game.only(Finish).code is Reason.TOO_SLOW


def test_a_lost_one_is_waited_for_and_comes_back():
    game = started(3)
    game.send(0)
    old = game.rounds.sum
    game.handle(Lost(1, "gone"))
    assert [type(each) for each in game.told] == [SetTimer]
    assert old.is_dropped
    assert game.rounds.sum is None
    game.join("node-1", step=0, has_state=True)
    assert game.opened[:2] == (0, 1)
    assert game.only(Open).again == {0, 2}


def test_two_are_lost_and_only_one_comes_back():
    game = started(3, samples=9)
    game.handle(Lost(1, "gone"))
    game.handle(Lost(2, "gone"))
    game.join("node-1", has_state=True)
    assert game.told == []
    game.fire()
    assert game.opened == (0, 1, {0: (0, 4), 1: (4, 9)})
    assert game.only(Open).again == frozenset()


def test_one_that_comes_back_without_its_weights_waits_for_the_next_step():
    game = started()
    game.step()
    game.handle(Lost(1, "gone"))
    game.join("node-1", step=0, has_state=False)
    assert game.opened == (1, 1, {0: (0, 8)})
    game.send(0)
    game.handle(Summed())
    assert game.only(Relay) == Relay(0, (1,), 2, 2)


def test_one_that_claims_to_be_ahead_has_no_say():
    game = started()
    game.join("stranger", step=99, has_state=True)
    game.step()
    assert game.only(Relay) == Relay(0, (2,), 1, 2)


def test_a_step_whose_average_reached_nobody_is_made_again():
    game = started()
    game.step()
    for worker in range(2):
        game.handle(Lost(worker, "gone"))
    game.join("node-0", step=0, has_state=True)
    game.join("node-1", step=0, has_state=True)
    assert game.opened[:2] == (0, 1)
    assert game.rounds.num_steps == 0
    game.step()
    assert game.opened[:2] == (1, 1)  # its first attempt was given away already


def made_again_without_the_first():
    """Worker 0 has applied the first step's average before it was lost; worker 1 has not, and makes the step again."""
    game = started()
    game.step()
    for worker in range(2):
        game.handle(Lost(worker, "gone"))
    game.join("node-1", step=0, has_state=True)
    game.fire()
    assert game.opened == (0, 1, {1: (0, 8)})
    return game


def test_weights_of_a_step_that_was_made_again_without_it_do_not_count():
    game = made_again_without_the_first()
    assert game.join("node-0", step=1, has_state=True) == 0
    game.step()
    assert game.only(Relay) == Relay(1, (0,), 1, 2)


def test_nor_when_it_is_lost_again_before_it_has_others():
    game = made_again_without_the_first()
    game.join("node-0", step=1, has_state=True)
    game.handle(Lost(0, "gone"))
    game.join("node-0", step=1, has_state=True)
    game.step()
    assert game.only(Relay) == Relay(1, (0,), 1, 2)


def test_steps_long_past_are_not_made_again():
    game = started()
    for _ in range(3):
        game.step()
    game.join("old", step=1, has_state=True)
    for worker in range(2):
        game.handle(Lost(worker, "gone"))
    game.fire()
    assert game.rounds.phase is Phase.GATHERING
    game.fire()
    assert str(game.only(Finish).error) == "No worker that joined within 60 s has the weights of step 3."


def test_who_has_the_weights_comes_in_the_end():
    game = started()
    game.step()
    for worker in range(2):
        game.handle(Lost(worker, "gone"))
    game.fire()
    assert game.rounds.phase is Phase.GATHERING
    game.join("fresh")
    assert game.told == []
    game.join("node-0", step=1, has_state=True)
    assert game.only(Relay).step == 1


def test_one_that_is_lost_too_often_is_not_waited_for():
    game = started()
    for _ in range(MOST_RETURNS):
        game.handle(Lost(1, "gone"))
        game.join("node-1", has_state=True)
    game.handle(Lost(1, "gone"))
    assert game.opened[2] == {0: (0, 8)}


def test_a_worker_that_leaves():
    game = started(3, samples=9)
    game.handle(Left(1))
    assert game.opened == (0, 1, {0: (0, 4), 2: (4, 9)})
    game.handle(Left(0))
    game.handle(Left(2))
    assert game.told == [Finish("all workers have left")]


def test_the_number_of_one_whose_gradient_counts_is_not_given_away():
    game = started()
    game.send(1)
    game.handle(Left(1))
    assert game.told == []
    assert game.join("new") == 2
    assert game.join("node-1", step=0, has_state=True) == 3
    game.send(0)
    game.handle(Summed())
    assert game.only(Relay) == Relay(0, (2, 3), 1, 2)


def test_a_refused_gradient_halts():
    game = started()
    game.handle(Misbehaved(1, WireError(Reason.WRONG_LENGTH, "7.")))
    finish = game.only(Finish)
    assert isinstance(finish.error, Mismatch)
    assert (finish.error.rank, finish.error.step, finish.code) == (1, 0, Reason.WRONG_LENGTH)


def test_or_the_others_go_on():
    game = started(policy="go on")
    game.handle(Misbehaved(1, BAD))
    assert game.told[0] == Dismiss(1, Reason.NOT_FINITE, "part 0.")
    assert game.opened == (0, 1, {0: (0, 8)})
    assert game.rounds.refusal("node-1", 2).detail.startswith("node-1 was dropped: not_finite: ")


def test_before_the_run_nobody_can_halt_it():
    game = Game(2)
    game.join("a", 1)
    assert game.handle(Misbehaved(0, BAD)) == [Dismiss(0, Reason.NOT_FINITE, "part 0.")]
    assert game.join("b", 1) == 0


def test_a_lost_worker_of_version_1_halts():
    game = Game(1)
    game.join("a", 1)
    game.handle(Lost(0, "gone"))
    assert isinstance(game.only(Finish).error, PeerLost)


def test_a_worker_of_version_1_that_leaves_is_left_out():
    game = Game(2)
    game.join("a", 1)
    game.join("b", 1)
    game.send(0)
    game.handle(Left(1))
    assert game.told == [Average((WHOLE,), has_losses=True)]
    assert game.rounds.sum.is_complete


def test_versions_do_not_mix_and_version_1_is_never_late():
    game = Game(1)
    game.join("a")
    assert game.rounds.refusal("b", 1).reason is Reason.VERSION_REFUSED
    game = Game(1)
    game.join("a", 1)
    assert game.rounds.refusal("b", 2).reason is Reason.VERSION_REFUSED
    assert game.rounds.refusal("b", 1).reason is Reason.VERSION_REFUSED


def test_a_state_that_does_not_come():
    game = Game(3, policy="go on", step_seconds=5.0)
    for name in "abc":
        game.join(name)
    assert [type(each) for each in game.told] == [Relay, SetTimer]
    game.fire()
    assert game.told[0] == Dismiss(0, Reason.TOO_SLOW, "no state of step 0 within 5 s.")
    assert game.only(Relay) == Relay(1, (2,), 0, 2)


def test_a_state_that_one_does_not_take():
    game = Game(3, step_seconds=5.0)
    for name in "abc":
        game.join(name)
    game.fire(1)
    assert game.told[0] == Dismiss(1, Reason.TOO_SLOW, "it did not take the state of step 0 within 5 s.")
    assert isinstance(game.only(SetTimer), SetTimer)
    game.handle(StateSent(1))
    assert game.opened == (0, 0, {0: (0, 4), 2: (4, 8)})


def test_a_state_of_an_older_request_means_nothing():
    game = Game(3)
    for name in "abc":
        game.join(name)
    game.handle(Lost(0, "gone"))
    assert game.only(Relay) == Relay(1, (2,), 0, 2)
    assert game.handle(StateSent(1)) == []


def test_first_weights_that_were_chosen_anew_are_the_only_ones():
    game = started()
    game.handle(Left(1))
    game.join("fresh")
    game.join("another")
    game.handle(Left(0))
    relay = game.only(Relay)
    game.join("node-1", step=0, has_state=True)
    game.handle(StateSent(relay.request))
    assert game.opened[2].keys() == {relay.source, *relay.sinks}


def test_nothing_is_added_to_a_round_that_nobody_is_left_of():
    game = started(1)
    for _ in range(MOST_RETURNS):
        game.handle(Lost(0, "gone"))
        game.join("node-0", has_state=True)
    game.handle(Lost(0, "gone"))
    assert game.rounds.phase is Phase.GATHERING
    assert game.rounds.sum is None


def test_a_sink_that_comes_back_during_the_sync_has_nothing_yet():
    game = Game(3)
    for name in "abc":
        game.join(name)
    game.handle(Lost(1, "gone"))
    assert game.join("b") == 1
    game.handle(StateSent(1))
    assert game.opened == (0, 0, {0: (0, 4), 2: (4, 8)})
    game.step()
    assert game.only(Relay) == Relay(0, (1,), 1, 2)


def test_too_few_after_a_sync_wait_for_more():
    game = Game(3, min_workers=3)
    for name in "abc":
        game.join(name)
    game.handle(Lost(1, "gone"))
    game.handle(StateSent(1))
    assert game.rounds.phase is Phase.GATHERING
    game.join("b")
    assert game.only(Relay) == Relay(0, (1,), 0, 2)
    game.handle(StateSent(2))
    assert game.opened[2].keys() == {0, 1, 2}


def test_too_few_have_the_weights_when_one_comes_back_without():
    game = started(min_workers=2)
    game.step()
    game.handle(Lost(1, "gone"))
    game.join("node-1")
    assert game.only(Relay) == Relay(0, (1,), 1, 2)
    game.handle(StateSent(2))
    assert game.opened == (1, 1, {0: (0, 4), 1: (4, 8)})


def test_shares_by_speed():
    game = started(shares="by speed", samples=10)
    game.now = 1.0
    game.send(0)
    game.now = 4.0
    game.send(1)
    game.handle(Summed())
    assert game.opened[2] == {0: (0, 8), 1: (8, 10)}


def test_stopping():
    game = started()
    assert game.handle(StopAsked("enough")) == [Finish("enough")]
    assert game.rounds.phase is Phase.DONE


class AnyRun(RuleBasedStateMachine):
    """Workers come, go, are lost and come back in any order; each keeps a history of what it has applied."""

    def __init__(self) -> None:
        super().__init__()
        self.game = Game(3, samples=6)
        self.is_first_server = True
        self.applied: dict[str, list[tuple[int, int]]] = {}
        """By node: (step, attempt) of all averages that made its weights what they are."""
        self.began_with: dict[str, str] = {}
        """By node: whose first weights it has."""
        self.here: dict[str, int] = {}
        self.fresh: set[str] = set()
        self.receiving: set[str] = set()
        """Those that are still on the connection which the state is sent to."""

    def take(self) -> None:
        for told in self.game.told:
            if isinstance(told, Open):
                self.check_same_weights(told)
            elif isinstance(told, Relay):
                self.send_state(told)

    def send_state(self, relay: Relay) -> None:
        self.receiving = {name for name, worker in self.here.items() if worker in relay.sinks}

    def check_same_weights(self, opened: Open) -> None:
        """All who take part have the same history, which is of exactly the steps before."""
        names = [name for name, worker in self.here.items() if worker in opened.sum.shares]
        assert len(names) == len(opened.sum.shares)
        histories = [self.applied[name] for name in names]
        for history in histories:
            assert [step for step, _ in history] == list(range(opened.sum.step))
        if self.is_first_server:  # another one cannot know which attempt at a step somebody has applied
            assert all(history == histories[0] for history in histories)
            assert len({self.began_with[name] for name in names}) == 1
        assert sum(share.length for share in opened.sum.shares.values()) == 6

    @property
    def is_over(self) -> bool:
        return self.game.rounds.phase is Phase.DONE

    @precondition(lambda self: not self.is_over)
    @rule(number=st.integers(0, 4), is_new=st.booleans())
    def join(self, number, is_new) -> None:
        name = f"node-{number}"
        if name in self.here:
            return
        if is_new or name not in self.applied:
            self.applied[name], self.began_with[name] = [], name
            self.fresh.add(name)
        self.here[name] = -1
        rounds, step = self.game.rounds, len(self.applied[name])
        has_state = name not in self.fresh
        member = rounds.roster.admit(name, 2, step if has_state else 0, has_state)
        self.here[name] = member.worker
        self.game.handle(Joined(member.worker))
        self.take()

    @precondition(lambda self: self.here and not self.is_over)
    @rule(data=st.data(), is_leaving=st.booleans())
    def go(self, data, is_leaving) -> None:
        name = data.draw(st.sampled_from(sorted(self.here)))
        worker = self.here.pop(name)
        self.receiving.discard(name)
        self.game.handle(Left(worker) if is_leaving else Lost(worker, "gone"))
        self.take()

    @precondition(lambda self: self.game.rounds.phase is Phase.SYNCING)
    @rule()
    def sync(self) -> None:
        relay = self.game.rounds._syncing
        names = {worker: name for name, worker in self.here.items()}
        source = names[relay.source]
        for name in self.receiving:
            self.applied[name], self.began_with[name] = list(self.applied[source]), self.began_with[source]
            self.fresh.discard(name)
        self.fresh.discard(names[relay.source])
        self.game.handle(StateSent(relay.request))
        self.take()

    @precondition(lambda self: self.game.rounds.sum is not None)
    @rule(data=st.data())
    def send(self, data) -> None:
        total = self.game.rounds.sum
        left = [worker for worker in self.here.values() if worker in total.shares and not total.has_all_of(worker)]
        if left:
            self.game.send(data.draw(st.sampled_from(sorted(left))))
        if total.is_complete:
            self.complete(data, total)

    def complete(self, data, total) -> None:
        """The average is sent; it reaches some, and others are lost before."""
        names = [name for name, worker in sorted(self.here.items()) if worker in total.shares]
        reached = [name for name in names if data.draw(st.booleans(), label=f"{name} gets the average")]
        for name in reached:
            self.applied[name].append((total.step, total.attempt))
            self.fresh.discard(name)
        missed = [(name, self.here.pop(name)) for name in names if name not in reached]
        told = self.game.handle(Summed())
        for relay in told:
            if isinstance(relay, Relay):
                self.send_state(relay)
        for _, worker in missed:
            self.game.handle(Lost(worker, "before the average came"))
            self.take()
        if not missed:
            self.game.told = told
            self.take()

    @precondition(lambda self: self.game.rounds.phase in (Phase.WAITING, Phase.GATHERING))
    @rule()
    def wait(self) -> None:
        self.game.fire()
        self.take()

    @precondition(lambda self: self.is_over)
    @rule()
    def start_anew(self) -> None:
        self.restart()

    def restart(self) -> None:
        """The server; workers keep what they have."""
        self.game, self.is_first_server, self.here = Game(3, samples=6), False, {}

    @invariant()
    def the_phase_fits(self) -> None:
        rounds = self.game.rounds
        assert (rounds.sum is not None) == (rounds.phase is Phase.ROUND)
        if rounds.phase is Phase.ROUND:
            missing = [worker for worker in rounds.sum.shares if not rounds.sum.has_all_of(worker)]
            assert all(worker in self.here.values() for worker in missing), "a round that cannot end"


class AnyRunAndServer(AnyRun):
    """The server is killed now and then, too."""

    @rule()
    def kill(self) -> None:
        self.restart()


for machine in (AnyRun, AnyRunAndServer):
    machine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestAnyRun = AnyRun.TestCase
TestAnyRunAndServer = AnyRunAndServer.TestCase
