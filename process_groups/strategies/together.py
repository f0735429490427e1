"""Runs the programs of all ranks in one process, with a message queue from each rank to each other."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Generator, Iterator, Sequence

import torch

from process_groups.strategies.arithmetic import combine, finish, wide_dtype
from process_groups.strategies.program import Program, Transfer

Mail = defaultdict[tuple[int, int], deque[torch.Tensor]]
"""What is on its way, by sender and receiver."""


def run_together(programs: Sequence[Program], tensors: Sequence[torch.Tensor], op: str) -> None:
    """All-reduce the ranks' contiguous tensors in place. A program that does not end is an AssertionError."""
    assert len(programs) == len(tensors), (len(programs), len(tensors))
    wide = wide_dtype(tensors[0].dtype, op)
    buffers = [tensor.view(-1).to(wide) for tensor in tensors]  # the same memory, if the type is wide enough
    mail: Mail = defaultdict(deque)
    _interpret({me: _run(programs[me], me, buffer, mail, op) for me, buffer in enumerate(buffers)}, mail)
    for tensor, buffer in zip(tensors, buffers, strict=True):
        finish(buffer, op, len(tensors))
        if tensor.dtype != wide:
            tensor.view(-1).copy_(buffer)


def _interpret(runs: dict[int, Iterator[int]], mail: Mail) -> None:
    """Go on with whoever can, until all are done."""
    awaited: dict[int, int] = {}
    while runs:
        ready = [me for me in runs if me not in awaited or mail[awaited[me], me]]
        if not ready:
            raise AssertionError("stuck: " + ", ".join(f"rank {me} waits for rank {awaited[me]}" for me in runs))
        for me in ready:
            peer = next(runs[me], None)
            if peer is None:
                del runs[me]
            else:
                awaited[me] = peer
    unread = [pair for pair, queue in mail.items() if queue]
    assert not unread, f"sent and never received, (from, to): {unread}"


def _run(program: Program, me: int, buffer: torch.Tensor, mail: Mail, op: str) -> Iterator[int]:
    """Run one rank's program; where a message is missing, yield the rank that it must come from."""
    for step in program:
        for send in step.sends:
            mail[me, send.peer].append(buffer[send.start : send.stop].clone())
        for receive in step.reduces:
            theirs = yield from _received(receive, me, mail)
            combine(buffer[receive.start : receive.stop], theirs, op)
        for receive in step.replaces:
            theirs = yield from _received(receive, me, mail)
            buffer[receive.start : receive.stop].copy_(theirs)


def _received(receive: Transfer, me: int, mail: Mail) -> Generator[int, None, torch.Tensor]:
    queue = mail[receive.peer, me]
    if not queue:
        yield receive.peer
    message = queue.popleft()
    # A message of one element would fit anywhere, for torch would repeat it.
    assert len(message) == receive.stop - receive.start, f"rank {me} got {len(message)} elements for {receive}"
    return message
