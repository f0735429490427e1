"""Whether anybody asks for a run's metrics, and when it is the next time."""

from __future__ import annotations

from concurrent.futures import Future


class Scrapes:
    """The station's thread's own."""

    def __init__(self) -> None:
        self._were_any = False
        self._next: Future[None] | None = None

    def note(self) -> None:
        """All that is known has been told to somebody just now."""
        self._were_any = True
        if self._next is not None and not self._next.done():
            self._next.set_result(None)

    def next(self) -> Future[None] | None:
        """Done with the next one; None where nobody has asked so far."""
        self._next = Future() if self._were_any else None
        return self._next
