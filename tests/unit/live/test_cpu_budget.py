"""Work that may take a share of the time."""

from __future__ import annotations

import pytest

from monitoring.live.cpu_budget import CpuBudget


def test_what_took_long_is_due_late():
    now, used = [100.0], [0.0]
    budget = CpuBudget(0.01, pause=1.0, clock=lambda: now[0], processor=lambda: used[0])
    assert budget.is_due
    with budget.spent():
        used[0] += 0.05
        now[0] += 3.0  # most of which others had the core
    for moment, is_due in ((107.9, False), (108.1, True)):
        now[0] = moment
        assert budget.is_due is is_due


def test_what_took_nothing_is_due_after_the_pause():
    now = [0.0]
    budget = CpuBudget(0.01, pause=1.0, clock=lambda: now[0], processor=lambda: 0.0)
    with budget.spent():
        pass
    assert not budget.is_due
    now[0] = 1.0
    assert budget.is_due


def test_work_that_fails_is_not_due_again_at_once():
    now, used = [100.0], iter([0.0, 0.5])
    budget = CpuBudget(0.1, clock=lambda: now[0], processor=lambda: next(used))
    with pytest.raises(ZeroDivisionError), budget.spent():
        raise ZeroDivisionError
    assert not budget.is_due
    now[0] += 5.1
    assert budget.is_due


def test_what_takes_long_is_due_again_all_the_same():
    now, used = [0.0], iter([0.0, 5.0])
    budget = CpuBudget(0.01, longest=15.0, clock=lambda: now[0], processor=lambda: next(used))
    with budget.spent():
        pass
    now[0] = 14.9
    assert not budget.is_due
    now[0] = 15.0
    assert budget.is_due
