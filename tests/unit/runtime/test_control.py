"""The control channel: whole messages or none, and no rank can break its launcher."""

from __future__ import annotations

import os
import socket

import pytest

from runtime.control import (
    CONTROL_FD,
    MAX_MESSAGE_BYTES,
    RANK_PID,
    LauncherControl,
    RankControl,
    rank_control,
)


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield LauncherControl(ours), theirs


def test_messages_arrive_in_order(pair):
    launcher, theirs = pair
    rank = RankControl(theirs.fileno())
    rank.send("mesh", coords=[0, 1, 1])
    rank.send("loop_lag", p99=0.001)
    assert list(launcher.messages()) == [
        {"kind": "mesh", "coords": [0, 1, 1]},
        {"kind": "loop_lag", "p99": 0.001},
    ]
    assert rank.dropped == 0


def test_a_full_buffer_drops_and_counts(pair):
    launcher, theirs = pair
    rank = RankControl(theirs.fileno())
    sent = 0
    while rank.dropped == 0:
        rank.send("fill", text="x" * 1000)
        sent += 1
    assert not rank.send_within(0.0, "failed")
    assert rank.dropped == 2
    assert len(list(launcher.messages(at_most=sent + 1))) == sent - 1


def test_what_is_too_big_is_dropped_at_the_rank(pair):
    _, theirs = pair
    rank = RankControl(theirs.fileno())
    rank.send("big", text="x" * MAX_MESSAGE_BYTES)
    assert rank.dropped == 1


@pytest.mark.parametrize(
    "data",
    [
        b"not json",
        b"\xff\xfe",
        b"[]",
        b"3",
        b"{}",
        b'{"kind": 3}',
        b"[" * 60000,
        b"",
        b'{"kind": "' + b"x" * 100_000 + b'"}',
        b"9" * 5000,
    ],
    ids=lambda data: repr(data[:12]),
)
def test_malformed_data_is_counted_and_the_next_message_still_comes(pair, data):
    launcher, theirs = pair
    theirs.send(data)
    theirs.send(b'{"kind": "fine"}\n')
    assert list(launcher.messages()) == [{"kind": "fine"}]
    assert launcher.malformed == 1
    assert not launcher.ended


def test_the_end_is_seen(pair):
    launcher, theirs = pair
    theirs.send(b'{"kind": "last"}')
    theirs.close()
    assert list(launcher.messages()) == [{"kind": "last"}]
    assert launcher.ended


def test_only_the_rank_itself_has_a_channel(pair, monkeypatch):
    _, theirs = pair
    monkeypatch.delenv(CONTROL_FD, raising=False)
    assert rank_control() is None
    monkeypatch.setenv(CONTROL_FD, str(theirs.fileno()))
    monkeypatch.setenv(RANK_PID, str(os.getpid() + 1))
    assert rank_control() is None, "a program that a rank started"
    monkeypatch.setenv(RANK_PID, str(os.getpid()))
    assert rank_control() is not None
    with open(os.devnull) as file:
        monkeypatch.setenv(CONTROL_FD, str(file.fileno()))
        assert rank_control() is None, "the number is another file by now"


def test_a_launcher_speaks_too(pair):
    launcher, theirs = pair
    rank = RankControl(theirs.fileno())
    assert list(rank.messages()) == []
    assert launcher.send("command", stops=True)
    assert launcher.send("command", stops=False)
    launcher.connection.send(b"not json")
    assert launcher.send("last")
    assert list(rank.messages()) == [
        {"kind": "command", "stops": True},
        {"kind": "command", "stops": False},
        {"kind": "last"},
    ]
    assert rank.is_open


def test_a_rank_finds_out_that_its_launcher_is_gone(pair):
    launcher, theirs = pair
    rank = RankControl(theirs.fileno())
    launcher.send("last")
    launcher.connection.close()
    assert list(rank.messages()) == [{"kind": "last"}]
    assert not rank.is_open
    assert list(rank.messages()) == []


def test_a_rank_that_does_not_read_cannot_hold_its_launcher_up(pair):
    launcher, theirs = pair
    while launcher.send("command", text="x" * 1000):
        pass
    theirs.close()
    assert not launcher.send("command")
