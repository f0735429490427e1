"""What a rank tells of its uncaught error, and which of them follow from what a peer did."""

from runtime.control import MAX_MESSAGE_BYTES, decode, encode
from runtime.errors import GroupClosed, PeerLost
from runtime.launch.script import _communication_error, _report

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


class Heard:
    """Stands in for a rank's channel to its launcher."""

    def send_within(self, seconds, kind, **fields):
        self.data = encode(kind, fields)
        return True


def test_notes_are_told_and_bounded():
    error, control = ValueError("no"), Heard()
    for number in range(100):
        error.add_note(f"{number}: {'x' * MAX_MESSAGE_BYTES}")
    _report(error, control)
    assert len(control.data) < MAX_MESSAGE_BYTES / 2
    assert [note[-3:] for note in decode(control.data)["notes"]] == ["xxx"] * 4
    error.__notes__ = ["Layer 3."]
    _report(error, control)
    assert decode(control.data)["notes"] == ["Layer 3."]
