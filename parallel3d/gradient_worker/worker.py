"""`parallel3d.GradientWorker`: a torch model in a loop of the user's own, trained with others by a gradient server."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncGenerator, Iterator, Sequence
from types import TracebackType
from typing import Self

import torch
from torch import nn

from parallel3d.gradient_worker.early_parts import EarlyParts
from parallel3d.gradient_worker.parts import GradientPart, cut_into_parts, refill
from parallel3d.gradient_worker.state import Stateful, SyncedState
from runtime.errors import InvalidCall
from runtime.gradient_server.client.protocol import Average, Share
from runtime.gradient_server.client.worker import GIVE_UP_SECONDS, GradientClient


class GradientWorker:
    """One worker, for `async with`:

        async with GradientWorker("server:9000", token=token) as worker:
            worker.attach(model, optimizer)
            async for share in worker.shares():
                loss = loss_of(model, samples[share.start : share.end])  # the mean over the share
                loss.backward()
                try:
                    average = await worker.average(loss=loss)  # into every .grad
                except ShareChanged:
                    optimizer.zero_grad()
                    continue
                optimizer.step()
                optimizer.zero_grad()

    The connection lives on the event loop, and a server gives up a worker that is silent for 30 s: what computes longer
    than some seconds belongs into a thread, as in `await asyncio.to_thread(loss.backward)`.
    """

    def __init__(
        self,
        address: str,
        *,
        token: bytes | str | None = None,
        node_id: str | None = None,
        tls: ssl.SSLContext | None = None,
        step: int = 0,
        has_state: bool = False,
        give_up_seconds: float = GIVE_UP_SECONDS,
    ) -> None:
        """address: HOST:PORT. token: the run's. node_id: by which it is known when it comes back; a new one for each
        worker, if not given. step, has_state: where it goes on from, if its weights are more than first values.
        give_up_seconds: without a server."""
        self._client = GradientClient(
            address,
            token=token,
            node_id=node_id,
            tls=tls,
            step=step,
            has_state=has_state,
            give_up_seconds=give_up_seconds,
        )
        self._parts: list[GradientPart] = []
        self._also: list[GradientPart] = []
        self._early: EarlyParts | None = None
        self._own: tuple[list[tuple[torch.Size, torch.dtype]], list[GradientPart]] = [], []

    async def __aenter__(self) -> Self:
        await self._client.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.__aexit__(kind, error, trace)

    @property
    def node_id(self) -> str:
        return self._client.node_id

    @property
    def worker_id(self) -> int | None:
        """The server's number for this worker, once it has joined."""
        return self._client.worker_id

    @property
    def step(self) -> int:
        """The one that is computed or waited for next."""
        return self._client.step

    @property
    def num_joins(self) -> int:
        """How often it has joined: once, and again after each connection that was lost."""
        return self._client.num_joins

    @property
    def ended_because(self) -> str | None:
        """What the server said when it ended in order; None as long as it has not."""
        return self._client.ended_because

    def attach(
        self,
        model: nn.Module | None = None,
        optimizer: Stateful | None = None,
        extra_state: Stateful | None = None,
        *,
        also: Sequence[torch.Tensor] = (),
    ) -> None:
        """What all workers have in common: it is sent to those that come fresh or late, and taken from others. The
        model's trained parameters are those whose gradients `average` takes.

        extra_state: anything else with `state_dict` and `load_state_dict`, such as a scheduler. also: tensors whose
        values `average` replaces by their means too, such as counts.
        """
        named = {"model": model, "optimizer": optimizer, "extra": extra_state}
        self._client.keeper = SyncedState({name: thing for name, thing in named.items() if thing is not None})
        trained = [] if model is None else [each for each in model.parameters() if each.requires_grad]
        self._parts, self._also = cut_into_parts(trained), cut_into_parts(also)
        self._early = None

    async def shares(self) -> AsyncGenerator[Share, None]:
        """This worker's share of each step, until the server ends. To ask for one says that the step before has been
        applied."""
        while (share := await self._client.next_share()) is not None:
            if self._early is not None:
                self._early.take_num_kept()  # of a share that was not wanted any more
            yield share

    @contextlib.contextmanager
    def overlap(self) -> Iterator[None]:
        """Around a share's only backward: parts of the gradient are on their way while the rest is computed. Enter it
        on the event loop, and have backward in a thread: `with worker.overlap(): await asyncio.to_thread(…)`."""
        if not self._parts:
            raise InvalidCall("overlap: attach the model first.")
        if self._early is None:
            self._early = EarlyParts(self._parts)
        parts = [*self._parts, *self._also]
        outgoing = self._client.begin([each.sent for each in parts], [each.received for each in parts])
        loop = asyncio.get_running_loop()

        def advance(num_parts: int) -> None:
            if outgoing is not None:
                loop.call_soon_threadsafe(outgoing.advance, num_parts)

        with self._early.noting(advance):
            yield

    async def average(
        self,
        gradients: Sequence[torch.Tensor] | None = None,
        *,
        loss: float | torch.Tensor = 0.0,
        correct: int = 0,
        total: int | None = None,
    ) -> Average:
        """Replace gradients, which are the mean over the share's samples, by the mean over all workers' samples: those
        of the attached model, or these tensors, which are the same on all workers but for their values.

        loss: the mean over the share. correct: how many samples were right. total: the share's samples, if not all.
        All or nothing is written. Raises ShareChanged where the average will not come: ask for the next share then.
        """
        gradient, also = self._kept(gradients)
        parts = [*gradient, *also]
        average = await self._client.average(
            [each.sent for each in parts],
            [each.received for each in parts],
            loss=float(loss.detach() if isinstance(loss, torch.Tensor) else loss),
            correct=int(correct),
            total=total,
        )
        for part in gradient:
            _put(part, into_grad=gradients is None)
        for part in also:
            _put(part, into_grad=False)
        return average

    def _kept(self, gradients: Sequence[torch.Tensor] | None) -> tuple[list[GradientPart], list[GradientPart]]:
        """What is to be averaged: gradients, and what else."""
        if gradients is not None:
            return self._kept_own(gradients), []
        if not self._parts:
            raise InvalidCall("average: attach the model first, or give the gradients.")
        num_sent = self._early.take_num_kept() if self._early is not None else 0
        for part in self._parts[num_sent:]:
            part.keep([each.grad for each in part.tensors])
        for part in self._also:
            part.keep(part.tensors)
        return self._parts, self._also

    def _kept_own(self, gradients: Sequence[torch.Tensor]) -> list[GradientPart]:
        known = [(each.shape, each.dtype) for each in gradients]
        if self._own[0] != known:
            self._own = known, cut_into_parts(gradients)
        parts = self._own[1]
        refill(parts, gradients)
        for part in parts:
            part.keep(part.tensors)
        return parts


@torch.no_grad()
def _put(part: GradientPart, *, into_grad: bool) -> None:
    for tensor, average in zip(part.tensors, part.averages(), strict=True):
        target = tensor.grad if into_grad else tensor
        if target is not None and target.layout is torch.strided:
            target.copy_(average)
        else:
            tensor.grad = average.to(tensor.device, copy=True)
