"""The event loop's lag: counted, and sent."""

from __future__ import annotations

import asyncio
import json
import math
import time

import pytest

from monitoring.events.loop_lag import BOUNDS, LagHistogram, LagMeter


def histogram(*lags: float) -> LagHistogram:
    made = LagHistogram()
    for lag in lags:
        made.observe(lag)
    return made


def test_each_lag_is_counted_under_its_bound():
    found = histogram(0.0, 0.0005, 0.0006, 0.3, 50.0)
    assert found.counts == [2, 1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 1]
    assert found.worst == 50.0
    assert found.total == pytest.approx(50.3011)


def test_quantiles_lie_within_their_bucket_and_never_above_the_worst():
    found = histogram(*[0.0004] * 98, 0.004, 0.004)
    assert found.quantile(0.49) == pytest.approx(0.00025)
    assert found.quantile(0.98) == pytest.approx(0.0005)
    assert found.quantile(0.99) == pytest.approx(0.003)
    assert found.quantile(1.0) == 0.004
    assert histogram().quantile(0.99) == 0.0
    assert histogram(7.0).quantile(1.0) == 7.0, "not infinity"


@pytest.mark.parametrize("lag", [0.3, 0.4, 0.6, 0.9])
def test_levels_of_severity_are_told_apart(lag):
    """Those of `event_loop_lag` are 0.1, 0.25, 0.5 and 1 s."""
    found = histogram(*[0.01] * 90, *[lag] * 10).quantile(0.95)
    assert (0.25 < found <= 0.5) == (0.25 < lag <= 0.5)


def test_a_histogram_travels_as_json():
    sent = histogram(0.001, 0.2)
    assert LagHistogram.from_wire(json.loads(json.dumps(sent.to_wire()))) == sent
    assert LagHistogram.from_wire(json.loads(json.dumps(histogram().to_wire()))) == histogram()


def test_what_was_sent_does_not_change_with_later_timers():
    """Rank 0 without a supervisor sends to itself."""
    lag = histogram()
    sent = lag.to_wire()
    lag.observe(0.5)
    assert LagHistogram.from_wire(sent) == histogram()


COUNTS = [0] * len(BOUNDS)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "counts do not fit the bounds"),
        ({"counts": COUNTS[1:], "total": 0.0, "worst": 0.0}, "counts do not fit the bounds"),
        ({"counts": "0" * len(BOUNDS), "total": 0.0, "worst": 0.0}, "counts do not fit the bounds"),
        ({"counts": [*COUNTS[1:], 0.5], "total": 0.0, "worst": 0.0}, "counts do not fit the bounds"),
        ({"counts": [*COUNTS[1:], True], "total": 0.0, "worst": 0.0}, "counts do not fit the bounds"),
        ({"counts": [*COUNTS[1:], -1], "total": 0.0, "worst": 0.0}, "counts do not fit the bounds"),
        ({"counts": COUNTS, "total": "0", "worst": 0.0}, "total and worst are numbers"),
        ({"counts": COUNTS, "total": math.nan, "worst": 0.0}, "total and worst are numbers"),
        ({"counts": COUNTS, "total": 0.0, "worst": math.inf}, "total and worst are numbers"),
        ({"counts": COUNTS, "total": 0.0}, "total and worst are numbers"),
    ],
)
def test_what_no_rank_can_have_sent_is_refused(fields, message):
    with pytest.raises(ValueError, match=rf"^event-loop lag: {message}$"):
        LagHistogram.from_wire(fields)


async def test_a_busy_loop_is_noticed():
    meter = LagMeter(interval=0.001)
    meter.start()
    time.sleep(0.05)  # noqa: ASYNC251  the lag itself
    await asyncio.sleep(0.005)  # its timer is due before this one
    meter.stop()
    assert 0.045 < meter.histogram.worst < 30
    stopped = sum(meter.histogram.counts)
    await asyncio.sleep(0.01)
    assert sum(meter.histogram.counts) == stopped
