"""What each rank has called, in shared memory where its peers on the same host can read it.

A rank owns one segment: a memory file that peers map through /proc/<pid>/fd, so nothing is left behind after a
crash. Only the owner writes to it. It holds a page a group, and a page holds one ring for the collectives and
two for each peer (sends, receives). Ranks compare rings before bytes move: gloo aborts the whole process when
sizes differ. The last rank to arrive always sees what the others called, so a mismatch is found before the call
can start. (Both could miss each other only if a store stayed in a CPU's buffer for the microseconds Python takes
from its own post to its first look.)
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import secrets
import select
import struct
import time
import zlib
from collections.abc import Sequence
from functools import lru_cache

from runtime.errors import CommunicationError

_NONCE = 16
_HEADER = _NONCE + 8  # the nonce and the heartbeat
_RING_HEAD = 2  # words: how many calls were issued, how many have finished
_TEXT = 256  # bytes of a text with its head
_LONGEST = 240  # characters of a text; they are ASCII
_MASK = (1 << 32) - 1
_NOTE = 4096
_COLLECTIVE_SLOTS = 256  # a rank may run this far ahead of its peers and still be checked
_PEER_SLOTS = 256
_NUMBER = struct.Struct("<Q")
_TEXT_HEAD = struct.Struct("<II")
_NOTE_HEAD = struct.Struct("<II")
_OPEN, _BROKEN, _LEFT = 0, 1, 2


class Ring:
    """The latest calls on one channel, numbered from 1: a word a call, and the texts that the words stand for.

    A word is the call's number and a hash of its text, written in one store. Most calls repeat an earlier text, so
    a text is written only when it is new, or so old that a peer which is `num_slots` calls behind could miss it.
    """

    def __init__(self, memory: memoryview, num_slots: int) -> None:
        self._num_slots, self._num_texts = num_slots, 2 * num_slots
        end = 8 * (_RING_HEAD + num_slots)
        self._words, self._texts = memory[:end].cast("Q"), memory[end : end + self._num_texts * _TEXT]
        self._num_finished = self._num_written = 0
        self._written: dict[str, int] = {}

    @staticmethod
    def size(num_slots: int) -> int:
        return 8 * (_RING_HEAD + num_slots) + 2 * num_slots * _TEXT

    @property
    def issued(self) -> int:
        return self._words[0]

    @property
    def finished(self) -> int:
        return self._words[1]

    def post(self, number: int, text: str) -> int:
        """Write down the next call; the word that stands for it, in every ring."""
        if self._num_written - self._written.get(text, -self._num_texts) >= self._num_slots:
            self._write(text)
        word, words = (number & _MASK) << 32 | _hash(text), self._words
        words[_RING_HEAD + number % self._num_slots] = word
        words[0] = number
        return word

    def _write(self, text: str) -> None:
        data = text[:_LONGEST].encode()
        at = self._num_written % self._num_texts * _TEXT
        _TEXT_HEAD.pack_into(self._texts, at, 0, 0)  # nobody shall take the new text for the old one
        self._texts[at + _TEXT_HEAD.size : at + _TEXT_HEAD.size + len(data)] = data
        _TEXT_HEAD.pack_into(self._texts, at, _hash(text), len(data))
        self._written[text] = self._num_written
        self._num_written += 1
        if len(self._written) > 2 * self._num_texts:
            self._written = {t: n for t, n in self._written.items() if self._num_written - n < self._num_slots}

    @property
    def room_until(self) -> int:
        """The first number too far ahead: its slot holds a call that this ring's owner has not compared yet."""
        return self.issued + self._num_slots

    def finish(self) -> None:
        self._num_finished += 1
        self._words[1] = self._num_finished

    def read(self, number: int) -> str | None:
        """What was called as `number`; None when not yet, or when the ring has gone on."""
        word = self._words[_RING_HEAD + number % self._num_slots]
        if word >> 32 != number & _MASK or number == 0:
            return None
        for at in range(0, len(self._texts), _TEXT):
            known, length = _TEXT_HEAD.unpack_from(self._texts, at)
            if known == word & _MASK and length:
                start = at + _TEXT_HEAD.size
                return bytes(self._texts[start : start + length]).decode()
        return None

    def differs(self, number: int, mine: int) -> str | None:
        """The text of another word than mine that stands there as `number`, if one does."""
        word = self._words[_RING_HEAD + number % self._num_slots]
        if word == mine or word >> 32 != number & _MASK:
            return None
        for _ in range(20):  # a CPU with weaker ordering than x86 may show the word before the text
            if (other := self.read(number)) is not None:
                return other
            time.sleep(0.001)
        return "something else"


@lru_cache(maxsize=4096)
def _hash(text: str) -> int:
    return zlib.crc32(text[:_LONGEST].encode())


class Page:
    """One group's part of a segment."""

    def __init__(self, memory: memoryview, group_size: int) -> None:
        self._memory = memory
        starts = self._starts(group_size)
        self.collectives = Ring(memory[starts[0] :], _COLLECTIVE_SLOTS)
        peers = [Ring(memory[at:], _PEER_SLOTS) for at in starts[1:]]
        self.sends, self.receives = peers[:group_size], peers[group_size:]

    @staticmethod
    def _starts(group_size: int) -> list[int]:
        first_peer, each = _NOTE + Ring.size(_COLLECTIVE_SLOTS), Ring.size(_PEER_SLOTS)
        return [_NOTE, *(first_peer + i * each for i in range(2 * group_size))]

    @staticmethod
    def size(group_size: int) -> int:
        return _NOTE + Ring.size(_COLLECTIVE_SLOTS) + 2 * group_size * Ring.size(_PEER_SLOTS)

    def close(self, error: CommunicationError | None) -> None:
        """Say that this rank has left (None), or why it gave the group up. The first word stands."""
        if self._state() != _OPEN:
            return
        note = b"" if error is None else _note(error)
        self._memory[8 : 8 + len(note)] = note
        _NOTE_HEAD.pack_into(self._memory, 0, _LEFT if error is None else _BROKEN, len(note))

    def _state(self) -> int:
        return int(_NOTE_HEAD.unpack_from(self._memory, 0)[0])

    @property
    def has_left(self) -> bool:
        return self._state() == _LEFT

    def broken_by(self) -> CommunicationError | None:
        """Why the owner gave the group up."""
        state, length = _NOTE_HEAD.unpack_from(self._memory, 0)
        return (
            CommunicationError.from_wire(json.loads(bytes(self._memory[8 : 8 + length]))) if state == _BROKEN else None
        )


def _note(error: CommunicationError) -> bytes:
    """The error in the room that a page has: kind and rank are kept, the longest words are cut."""
    wire = error.to_wire()
    while len(note := json.dumps(wire).encode()) > _NOTE - _NOTE_HEAD.size:
        longest = max("message", "action", key=lambda name: len(wire[name] or ""))
        wire[longest] = wire[longest][: len(wire[longest]) * 7 // 8]
    return note


class Segment:
    """A rank's shared memory: this rank's own, or a peer's as this process maps it."""

    def __init__(self, fd: int, address: str, group_sizes: Sequence[int]) -> None:
        self.address = address
        self._fd = fd
        self._mapping = mmap.mmap(fd, 0)
        self._memory = memoryview(self._mapping)
        self.pages: list[Page] = []
        at = _HEADER
        for size in group_sizes:
            self.pages.append(Page(self._memory[at : at + Page.size(size)], size))
            at += Page.size(size)

    @classmethod
    def create(cls, group_sizes: Sequence[int]) -> Segment:
        fd = os.memfd_create("parallel3d-board", os.MFD_CLOEXEC)
        nonce = secrets.token_bytes(_NONCE)
        try:
            os.ftruncate(fd, _HEADER + sum(map(Page.size, group_sizes)))
        except OSError:
            os.close(fd)
            raise
        os.pwrite(fd, nonce, 0)
        return cls(fd, f"{os.getpid()}/{fd}/{nonce.hex()}", group_sizes)

    @classmethod
    def open(cls, address: str, group_sizes: Sequence[int]) -> Segment | None:
        """Map a peer's segment; None where that can't be done: another host, container or user."""
        pid, number, nonce = address.split("/")
        try:
            fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            return None
        # The same pid and number may exist here and mean something else, a pipe even: the nonce decides.
        with contextlib.suppress(OSError):
            if os.pread(fd, _NONCE, 0).hex() == nonce:
                return cls(fd, address, group_sizes)
        os.close(fd)
        return None

    @property
    def heartbeats(self) -> int:
        return int(_NUMBER.unpack_from(self._memory, _NONCE)[0])

    def beat(self) -> None:
        """The owner's event loop moves."""
        _NUMBER.pack_into(self._memory, _NONCE, self.heartbeats + 1)

    @property
    def pid(self) -> int:
        """The owner's process."""
        return int(self.address.split("/")[0])

    def close(self) -> None:
        os.close(self._fd)  # the mapping goes with the last view of it


class Pulse:
    """Whether a peer on this host still lives, and whether its event loop still moves."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._heartbeats, self._changed = segment.heartbeats, time.monotonic()
        self._fd = os.pidfd_open(segment.pid)
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)

    def is_dead(self) -> bool:
        return bool(self._poll.poll(0))

    def seconds_still(self) -> float:
        """How long the heartbeat has stood still, as far as those who asked have seen."""
        heartbeats = self._segment.heartbeats
        if heartbeats != self._heartbeats:
            self._heartbeats, self._changed = heartbeats, time.monotonic()
        return time.monotonic() - self._changed

    def close(self) -> None:
        os.close(self._fd)
