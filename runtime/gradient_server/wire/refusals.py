"""Reasons for which a gradient server or a worker refuses what its peer sent."""

from __future__ import annotations

from enum import StrEnum

from runtime.errors import Parallel3DError


class Reason(StrEnum):
    """Why a frame, a join or a gradient was refused. A metric's label, and part of `Refused` on the wire."""

    TOO_LONG = "too_long"
    EMPTY = "empty"
    TRUNCATED = "truncated"
    TRAILING = "trailing"
    UNKNOWN_TAG = "unknown_tag"
    BAD_TEXT = "bad_text"
    BAD_DTYPE = "bad_dtype"
    BAD_CHECKSUM = "bad_checksum"
    UNPACKS_TOO_FAR = "unpacks_too_far"
    NOT_A_FRAME = "not_a_frame"
    NOT_JOINED = "not_joined"
    ALREADY_JOINED = "already_joined"
    VERSION_REFUSED = "version_refused"
    BAD_TOKEN = "bad_token"
    REPLAYED = "replayed"
    WRONG_WORKER = "wrong_worker"
    OLD_STEP = "old_step"
    FUTURE_STEP = "future_step"
    WRONG_BLOCK = "wrong_block"
    WRONG_COMPONENT = "wrong_component"
    WRONG_LENGTH = "wrong_length"
    WRONG_SIZES = "wrong_sizes"
    WRONG_TOTAL = "wrong_total"
    WRONG_ATTEMPT = "wrong_attempt"
    NOT_FINITE = "not_finite"
    UNEXPECTED = "unexpected"
    TOO_SLOW = "too_slow"
    OVER_BUDGET = "over_budget"


REASONS: dict[str, str] = {
    Reason.TOO_LONG: "longer than is allowed",
    Reason.EMPTY: "a frame of no bytes",
    Reason.TRUNCATED: "ends too early",
    Reason.TRAILING: "has bytes after its end",
    Reason.UNKNOWN_TAG: "no message has this tag",
    Reason.BAD_TEXT: "text that is no UTF-8",
    Reason.BAD_DTYPE: "no element type that may be here",
    Reason.BAD_CHECKSUM: "was damaged on the way",
    Reason.UNPACKS_TOO_FAR: "unpacks to more than it said",
    Reason.NOT_A_FRAME: "another protocol, or noise",
    Reason.NOT_JOINED: "comes before the join",
    Reason.ALREADY_JOINED: "joins a second time",
    Reason.VERSION_REFUSED: "this version of the protocol is not spoken here",
    Reason.BAD_TOKEN: "the token is another one",
    Reason.REPLAYED: "a join that was seen before",
    Reason.WRONG_WORKER: "another worker's id",
    Reason.OLD_STEP: "a step that is over",
    Reason.FUTURE_STEP: "a step that has not begun",
    Reason.WRONG_BLOCK: "no such block",
    Reason.WRONG_COMPONENT: "no such component",
    Reason.WRONG_LENGTH: "not as many elements as there should be",
    Reason.WRONG_SIZES: "other sizes than the other workers have",
    Reason.WRONG_TOTAL: "not as many samples as were assigned",
    Reason.WRONG_ATTEMPT: "an attempt that is over",
    Reason.NOT_FINITE: "NaN or infinite values",
    Reason.UNEXPECTED: "not now, or not from this side",
    Reason.TOO_SLOW: "did not come in time",
    Reason.OVER_BUDGET: "more memory than a connection may have",
}
"""What each means; comes before the detail in messages."""


class WireError(Parallel3DError):
    """What a peer sent is refused. `reason` is counted in metrics; `detail` is for people."""

    def __init__(self, reason: Reason, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail

    def __str__(self) -> str:
        text = f"{self.reason}: {REASONS[self.reason]}"
        return f"{text}: {self.detail}" if self.detail else f"{text}."
