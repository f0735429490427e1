"""Checks that the programs of a group's ranks keep the rules that `process_groups.strategies.program` states.

A rank waits for one named sender at a time, so what happens before what is the same in whatever order the ranks run:
one run of them shows all.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, permutations

from process_groups.strategies.program import Program, Transfer

Value = tuple[frozenset[int], int]
"""Whose values an element has in it, and the number of the addition that made it: equal numbers are equal bits."""


def check_programs(programs: Sequence[Program], numel: int) -> None:
    """An AssertionError begins with the rule that is broken."""
    _check_ranges(programs, numel)
    _check_pairs(programs)
    simulation = _Simulation(programs, numel)
    simulation.run()
    first, *others = [rank.values for rank in simulation.ranks]
    everyone = frozenset(range(len(programs)))
    assert all(contributors == everyone for contributors, _ in first), f"(e) not all are in {first}"
    assert all(other == first for other in others), "(e) an element was computed twice"


def _check_ranges(programs: Sequence[Program], numel: int) -> None:
    for rank, program in enumerate(programs):
        for step in program:
            assert step.sends or step.reduces or step.replaces, "(b) a step does nothing"
            for one in (*step.sends, *step.reduces, *step.replaces):
                assert 0 <= one.start < one.stop <= numel, f"(b) {one}"
                assert one.peer in set(range(len(programs))) - {rank}, f"(a) {one} of rank {rank}"


def _check_pairs(programs: Sequence[Program]) -> None:
    for sender, receiver in permutations(range(len(programs)), 2):
        sent = [(s.start, s.stop) for step in programs[sender] for s in step.sends if s.peer == receiver]
        received = [
            (r.start, r.stop) for step in programs[receiver] for r in step.reduces + step.replaces if r.peer == sender
        ]
        assert sent == received, f"(a) from {sender} to {receiver}: sent {sent}, received {received}"


@dataclass(slots=True)
class _Message:
    """What was sent, and when the receiver has applied it: at which of the receiver's receives."""

    sent: Transfer
    values: list[Value]
    clock: list[int]
    applied_at: int | None = None


@dataclass(slots=True)
class _Rank:
    values: list[Value]
    clock: list[int]
    """How many receives of each rank have certainly been applied, as far as this rank can know."""

    sent: list[_Message] = field(default_factory=list)


class _Simulation:
    def __init__(self, programs: Sequence[Program], numel: int) -> None:
        size = len(programs)
        self._programs = programs
        self._mail: dict[tuple[int, int], deque[_Message]] = defaultdict(deque)
        self._additions = count(size)
        self.ranks = [_Rank([(frozenset([rank]), rank)] * numel, [0] * size) for rank in range(size)]

    def run(self) -> None:
        runs = {me: self._run(me) for me in range(len(self.ranks))}
        awaited: dict[int, int | None] = dict.fromkeys(runs)
        while runs:
            ready = [me for me in runs if awaited[me] is None or self._mail[awaited[me], me]]
            assert ready, f"(c) ranks {list(runs)} wait for ever"
            for me in ready:
                awaited[me] = next(runs[me], None)
                if awaited[me] is None:
                    del runs[me]

    def _run(self, me: int) -> Iterator[int]:
        """Yields the rank that a missing message must come from."""
        rank = self.ranks[me]
        for step in self._programs[me]:
            for send in step.sends:
                message = _Message(send, rank.values[send.start : send.stop], rank.clock.copy())
                rank.sent.append(message)
                self._mail[me, send.peer].append(message)
            kinds = [True] * len(step.reduces) + [False] * len(step.replaces)
            for receive, is_reduce in zip(step.reduces + step.replaces, kinds, strict=True):
                if not self._mail[receive.peer, me]:
                    yield receive.peer
                self._apply(me, receive, self._mail[receive.peer, me].popleft(), is_reduce)

    def _apply(self, me: int, receive: Transfer, message: _Message, is_reduce: bool) -> None:
        rank = self.ranks[me]
        rank.clock = [max(pair) for pair in zip(rank.clock, message.clock, strict=True)]
        self._check_write(rank, receive)
        rank.clock[me] += 1
        message.applied_at = rank.clock[me]
        for index, theirs in zip(range(receive.start, receive.stop), message.values, strict=True):
            rank.values[index] = self._add(rank.values[index], theirs) if is_reduce else theirs

    def _check_write(self, rank: _Rank, write: Transfer) -> None:
        for earlier in rank.sent:
            if earlier.sent.start < write.stop and write.start < earlier.sent.stop:
                known = rank.clock[earlier.sent.peer]
                is_read = earlier.applied_at is not None and earlier.applied_at <= known
                assert is_read, f"(d) {write} is written, and perhaps {earlier.sent} is still unread"

    def _add(self, mine: Value, theirs: Value) -> Value:
        assert not mine[0] & theirs[0], f"(e) {sorted(mine[0] & theirs[0])} are added twice"
        return mine[0] | theirs[0], next(self._additions)
