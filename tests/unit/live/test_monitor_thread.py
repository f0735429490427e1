"""The monitor thread: messages reach the observer in order off the caller's path, and nothing is left behind."""

from __future__ import annotations

import base64
import os
import threading
import urllib.request

import pytest
from prometheus_client.core import GaugeMetricFamily

from monitoring.events.events import RECORD_BYTES
from monitoring.http.endpoint import Endpoint
from monitoring.live.monitor_thread import Inbox, MonitorThread
from monitoring.messages import DataQueue, Events, Joined, LogLine, Message, NonFinite
from tests.support.processes import SECONDS

BUG = NonFinite(0)


class Observer:
    """Notes what it is given and in which thread; may be held up, or fail."""

    def __init__(self) -> None:
        self.taken: list[tuple[int, Message | None]] = []
        self.threads: set[int] = set()
        self.niceness = 0
        self.go_on = threading.Event()
        self.go_on.set()

    def take(self, rank, message):
        assert self.go_on.wait(SECONDS)
        self.threads.add(threading.get_ident())
        self.niceness = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        self.taken.append((rank, message))
        if message == BUG:
            raise ZeroDivisionError("a bug of ours")


async def test_messages_come_in_order_in_a_thread_that_gives_way():
    observer = Observer()
    monitor = MonitorThread(observer)
    messages = [(rank, DataQueue(float(n), 2)) for n in range(500) for rank in range(3)]
    for rank, message in messages:
        monitor.take(rank, message)
    assert await monitor.settle(lambda: list(observer.taken)) == messages
    assert threading.get_ident() not in observer.threads
    assert observer.niceness == min(19, os.getpriority(os.PRIO_PROCESS, 0) + 10)
    await monitor.close()


async def test_messages_are_taken_without_being_asked_for():
    observer = Observer()
    arrived = threading.Event()
    monitor = MonitorThread(observer)
    observer.take = lambda rank, message: arrived.set()
    for _ in range(3):
        arrived.clear()
        monitor.take(0, DataQueue(1.0, 2))
        assert arrived.wait(SECONDS)
    await monitor.close()


async def test_an_observer_that_hangs_or_fails_holds_nobody_up(capfd):
    observer = Observer()
    observer.go_on.clear()
    monitor = MonitorThread(observer)
    for _ in range(3):
        monitor.take(0, BUG)
    monitor.take(0, DataQueue(1.0, 2))
    observer.go_on.set()
    await monitor.settle(lambda: None)
    assert [message for _, message in observer.taken] == [BUG, BUG, BUG, DataQueue(1.0, 2)]
    assert monitor.failures == 3
    assert capfd.readouterr().err.count("ZeroDivisionError: a bug of ours") == 1
    await monitor.close()


def events(number: int) -> Events:
    return Events(base64.b64encode(bytes(number * RECORD_BYTES)).decode(), 0)


def test_the_inbox_forgets_the_oldest_and_counts_what_was_in_them():
    inbox = Inbox(most_bytes=10_000)
    assert inbox.put(0, Joined(0, 0, 0))
    assert not inbox.put(3, events(60))
    for number in range(1, 4):
        inbox.put(number, events(30))
    assert inbox.lost_messages == 2
    assert [(rank, message.dropped) for rank, message in inbox.get(2)] == [(1, 0), (2, 0)]
    assert [(rank, message.dropped) for rank, message in inbox.get(2)] == [(3, 60)]
    assert inbox.get(2) == []
    assert inbox.put(0, Joined(0, 0, 0)), "it is the first that waits, so somebody has to be woken"


def test_the_inbox_counts_the_text_of_log_lines_too():
    inbox = Inbox(most_bytes=100_000)
    for number in range(20):
        inbox.put(0, LogLine({"event": "failed", "number": number, "exception": "x" * 10_000}))
    kept = inbox.get(20)
    assert len(kept) + inbox.lost_messages == 20
    assert [message.record["number"] for _, message in kept] == list(range(20 - len(kept), 20))
    assert len(kept) <= 9


async def test_the_status_is_told_in_the_thread():
    monitor, told = MonitorThread(Observer()), []
    monitor.on_status.append(lambda *status: told.append((*status, threading.current_thread().name)))
    monitor.set_status("failed", "rank 1 was killed")
    await monitor.settle(lambda: None)
    assert told == [("failed", "rank 1 was killed", "parallel3d-monitor")]
    assert (monitor.status, monitor.error) == ("failed", "rank 1 was killed")
    await monitor.close()


class OneGauge:
    def collect(self):
        yield GaugeMetricFamily("parallel3d_answer", "What it says.", 42)


def test_it_serves_from_the_beginning_and_leaves_nothing():
    from monitoring.http.server import make_app

    def open_and_close() -> None:
        endpoint = Endpoint.open("127.0.0.1", None)
        monitor = MonitorThread(Observer(), endpoint=endpoint, make_app=lambda monitor: make_app(endpoint, OneGauge()))
        with urllib.request.urlopen(endpoint.url("/metrics"), timeout=SECONDS) as answer:
            assert "parallel3d_answer 42.0" in answer.read().decode()
        url = endpoint.url("/metrics")
        monitor.close_now()
        with pytest.raises(OSError, match="refused"):
            urllib.request.urlopen(url, timeout=SECONDS)

    open_and_close()  # what is imported stays
    before = sorted(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(3):
        open_and_close()
    assert (sorted(os.listdir("/proc/self/fd")), threading.active_count()) == before


def test_it_can_be_closed_while_it_begins_to_serve(capfd):
    from monitoring.http.server import make_app

    def no_app(monitor):
        raise OSError("no application")

    for fails in (True, False):
        endpoint = Endpoint.open("127.0.0.1", None)
        app = make_app(endpoint, OneGauge())
        make = no_app if fails else lambda monitor, app=app: app
        MonitorThread(Observer(), endpoint=endpoint, make_app=make).close_now()
        assert endpoint.listener.fileno() == -1
    assert "parallel3d-monitor" not in [thread.name for thread in threading.enumerate()]
    assert capfd.readouterr().err.count("OSError: no application") == 1
