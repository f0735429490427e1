"""Which of a rank's uncaught errors follow from what a peer did."""

from runtime.errors import GroupClosed, PeerLost
from runtime.script import _communication_error

LOST, CLOSED, OWN = PeerLost("gone", rank=1), GroupClosed("closed"), ValueError("own")


def chained(error, cause):
    error.__cause__ = cause
    return error


def test_only_what_a_peer_did_counts():
    assert _communication_error(LOST) is LOST
    assert _communication_error(OWN) is None
    assert _communication_error(ExceptionGroup("tasks", [LOST, CLOSED])) is LOST
    assert _communication_error(ExceptionGroup("tasks", [ExceptionGroup("inner", [CLOSED]), LOST])) is CLOSED
    assert _communication_error(ExceptionGroup("tasks", [LOST, OWN])) is None
    assert _communication_error(chained(RuntimeError("step failed"), LOST)) is LOST
    assert _communication_error(chained(RuntimeError("step failed"), OWN)) is None
