"""Through the cache or round it: the way that suits how far the reader is, and the other one tried now and then."""

from __future__ import annotations

import pytest
import torch

from process_groups.shared_memory import writer
from process_groups.shared_memory.writer import Writer

PAUSE = writer._TRY_EVERY
TRIED, WARM_UP = writer._TRIED, writer._WARM_UP
NUM_BYTES = 4 * TRIED  # of a write


class Machine:
    """Where writes take as long as they are told to."""

    def __init__(self) -> None:
        self.now = 0.0
        self.through, self.around = 1.5e-10, 1e-10
        """Seconds that a byte takes."""
        self.times_if_tried = 1.0
        """Times as long as that takes what does not go the way of the latest large part."""
        self.to_begin = 0.0
        """Seconds more that a part takes which goes another way than the one before."""
        self.parts: list[tuple[str, int]] = []
        """Which way, and how many bytes."""

    def clock(self) -> float:
        return self.now

    def took(self, way: str, num_bytes: int) -> None:
        usual = next((way for way, num_bytes in reversed(self.parts) if num_bytes >= NUM_BYTES // 2), way)
        self.now += num_bytes * getattr(self, way) * (1.0 if way == usual else self.times_if_tried)
        self.now += self.to_begin if self.parts and self.parts[-1][0] != way else 0.0
        self.parts.append((way, num_bytes))

    def write(self, made: Writer, num: int = 1, values: torch.Tensor | None = None) -> list[tuple[str, int]]:
        """Some writes; their parts."""
        num_before = len(self.parts)
        values = torch.arange(NUM_BYTES // 8) if values is None else values
        for _ in range(num):
            target = torch.zeros(values.shape, dtype=values.dtype)
            made.write(target, values)
            assert torch.equal(target, values)
        return self.parts[num_before:]


@pytest.fixture
def machine(monkeypatch) -> Machine:
    made, copy = Machine(), torch.Tensor.copy_

    def stream(target: torch.Tensor, source: torch.Tensor) -> None:
        assert target.data_ptr() % 64 == 0, "nothing else can go round the cache"
        copy(target, source)
        made.took("around", source.nbytes)

    def copy_(target: torch.Tensor, source: torch.Tensor) -> None:
        copy(target, source)
        made.took("through", source.nbytes)

    monkeypatch.setattr(writer, "stream", stream)
    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    return made


AROUND, THROUGH = ("around", NUM_BYTES), ("through", NUM_BYTES)
AROUND_IS_TRIED = [("around", WARM_UP), ("around", TRIED - WARM_UP), ("through", NUM_BYTES - TRIED)]
THROUGH_IS_TRIED = [("through", WARM_UP), ("through", TRIED - WARM_UP), ("around", NUM_BYTES - TRIED)]


def test_near_readers_are_written_to_through_the_cache(machine):
    made = Writer(machine.clock)
    assert machine.write(made, 5) == [THROUGH] * 5
    for _ in range(5):
        machine.now += PAUSE
        assert machine.write(made, 5) == [*AROUND_IS_TRIED, *[THROUGH] * 4]
        assert not made.is_far


def test_far_readers_are_written_to_round_the_cache(machine):
    machine.through = 12e-10
    made = Writer(machine.clock)
    for _ in range(2):
        assert machine.write(made, 5)[-4:] == [THROUGH] * 4
        machine.now += PAUSE
    assert machine.write(made) == AROUND_IS_TRIED
    assert not made.is_far, "two tries may both be disturbed"
    machine.now += PAUSE
    assert machine.write(made, 5) == [*AROUND_IS_TRIED, *[AROUND] * 4]
    assert made.is_far
    for _ in range(3):
        machine.now += PAUSE
        assert machine.write(made, 5) == [*THROUGH_IS_TRIED, *[AROUND] * 4]
        assert made.is_far


@pytest.mark.parametrize("is_far", [False, True])
def test_seldom_writes_go_the_right_way_but_for_what_is_tried(machine, is_far):
    machine.through = 12e-10 if is_far else 1.5e-10
    made = Writer(machine.clock)
    parts = []
    for _ in range(10):
        machine.now += 2 * PAUSE
        parts += machine.write(made)
    assert made.is_far is is_far
    assert parts[:9] == AROUND_IS_TRIED * 3
    assert parts[9:] == (THROUGH_IS_TRIED if is_far else AROUND_IS_TRIED) * 7


def settle(machine: Machine, made: Writer) -> list[bool]:
    """What it holds after each of some tries."""
    held = []
    for _ in range(4):
        machine.now += PAUSE
        machine.write(made, 6)
        held.append(made.is_far)
    return held


@pytest.mark.parametrize(("times_if_tried", "to_begin"), [(1.0, 0.0), (3.0, 0.0), (1.0, 10e-6)])
def test_cores_that_move_are_noticed(machine, times_if_tried, to_begin):
    made = Writer(machine.clock)
    machine.times_if_tried, machine.to_begin = times_if_tried, to_begin
    assert settle(machine, made) == [False] * 4
    machine.through = 12e-10
    assert settle(machine, made) == [False, True, True, True]
    machine.through = 1.5e-10
    assert settle(machine, made) == [True, False, False, False], "after two tries of three"
    machine.through = 12e-10
    assert settle(machine, made)[-1]


def test_one_disturbed_write_changes_nothing(machine):
    made = Writer(machine.clock)
    settle(machine, made)
    machine.through = 1e-3
    machine.write(made)
    machine.through = 1.5e-10
    assert settle(machine, made) == [False] * 4


def test_no_more_is_tried_however_many_writes_there_are(machine):
    made = Writer(machine.clock)
    settle(machine, made)
    machine.through = machine.around = 0.0
    machine.now += PAUSE
    assert machine.write(made, 1000) == [*AROUND_IS_TRIED, *[THROUGH] * 999]


@pytest.mark.parametrize("num_bytes", [writer.WORTH_STREAMING, writer.WORTH_STREAMING + 4, TRIED, 2 * TRIED + 12])
def test_of_a_short_write_half_is_tried(machine, num_bytes):
    made = Writer(machine.clock)
    machine.now += PAUSE
    num_tried = min(TRIED, num_bytes // 2) // 64 * 64
    assert machine.write(made, 1, torch.arange(num_bytes // 4, dtype=torch.int32)) == [
        ("around", WARM_UP),
        ("around", num_tried - WARM_UP),
        ("through", num_bytes - num_tried),
    ]


@pytest.mark.parametrize(
    "values",
    [
        torch.arange(writer.WORTH_STREAMING // 8 - 1),
        torch.arange(NUM_BYTES).view(2, -1).t(),
        torch.randn(NUM_BYTES, dtype=torch.complex64).conj(),
        torch._neg_view(torch.arange(NUM_BYTES)),
        torch._efficientzerotensor(NUM_BYTES)[1000:],
    ],
    ids=["few", "not in a row", "conjugated", "negated", "without memory"],
)
def test_what_can_t_be_copied_as_bytes_or_is_not_worth_it_is_copied_by_torch(machine, values):
    made = Writer(machine.clock)
    for is_far in (False, True):
        made.is_far = is_far
        machine.now += PAUSE
        assert machine.write(made, 3, values) == [("through", values.nbytes)] * 3
        assert made.is_far is is_far, "and says nothing"


def test_nothing_is_tried_where_nothing_goes_round_the_cache(machine, monkeypatch):
    monkeypatch.setattr(writer, "CAN_STREAM", False)
    made = Writer(machine.clock)
    machine.now += 10 * PAUSE
    assert machine.write(made, 5) == [THROUGH] * 5
