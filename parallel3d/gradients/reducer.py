"""Gradients over the replicas: each bucket is summed up as soon as it is complete, while backward still runs.

The engine thread says what is there; the event loop reduces it. Buckets start in one order on every rank, so one that
is complete waits for those before it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from parallel3d.gradients.buckets import Bucket, FlatBucket, LooseBucket, check, fill, matrices_first
from parallel3d.gradients.readiness import Readiness
from parallel3d.rank_mesh import Mesh
from process_groups.work import Work
from runtime.errors import InvalidCall

Settle = Callable[[], Awaitable[None]]


class Reduced(NamedTuple):
    """What a step's reductions moved."""

    num_bytes: int
    """Of this rank's gradients."""
    seconds: float
    """In which at least one of them was under way, waits for other replicas included."""


@dataclass(slots=True)
class _Step:
    """One step's reductions."""

    num_home: int = 0
    """Buckets that are complete, with all before them. Counted by the engine thread; the rest is the event loop's."""
    done: set[int] = field(default_factory=set)
    """Stages."""
    works: list[Work] = field(default_factory=list)
    """One for each bucket that is on its way."""
    failure: Exception | None = None
    is_over: bool = False


class GradientSync:
    """Puts the parameters of a rank's stages into buckets, and sums their gradients up over the replicas.

    `order` is that in which the stages are done. Gradients of `late` parameters are reduced last, after `settle_late`
    was awaited, which may add up what other ranks have of them: it finds them at `gradient_home`, and in one piece by
    `flat_late`. Make it on the event loop.
    """

    def __init__(
        self,
        mesh: Mesh,
        stages: Mapping[int, Sequence[nn.Parameter]],
        order: Sequence[int],
        *,
        bucket_bytes: int,
        shard: bool = False,
        late: Collection[nn.Parameter] = (),
        settle_late: Settle | None = None,
    ) -> None:
        if sorted(order) != sorted(stages):
            raise InvalidCall(f"the stages {sorted(stages)} are given, but the order {list(order)}.")
        self._mesh, self._dp, self._order, self._settle_late = mesh, mesh.dp, tuple(order), settle_late
        self.is_sharded = shard and mesh.dp.size > 1
        """Whether each replica has only its slice of the sums."""
        self._loop = asyncio.get_running_loop()
        owner, num_stages_of = _owners(stages, order)
        late = _trained(late)
        every = _trained([each for stage in order for each in stages[stage]])
        check(every + [each for each in late if id(each) not in owner], mesh.dp.device)
        lates = set(map(id, late))
        self.buckets: list[Bucket] = []
        """In the order in which they are reduced."""
        self._readiness: dict[int, Readiness] = {}
        """By the place of the bucket."""
        for stage in order:
            own = [each for each in _trained(stages[stage]) if owner[id(each)] == stage and id(each) not in lates]
            self._add_stage(stage, fill(reversed(own), bucket_bytes), num_stages_of)
        self._num_early = len(self.buckets)
        self._ready = [False] * self._num_early
        self.buckets += [self._bucket(None, each) for each in fill(late, bucket_bytes)]
        self.parameters = [each for bucket in self.buckets for each in bucket.parameters]
        self._step = _Step(is_over=True)
        self.reduced = Reduced(0, 0.0)
        """By the last step that was finished."""
        self.settled = 0.0
        """When late gradients were last, a moment of time.monotonic: from then on replicas alone are waited for."""

    def _add_stage(self, stage: int, lists: Sequence[list[nn.Parameter]], num_stages_of: Mapping[int, int]) -> None:
        for parameters in lists:
            place = len(self.buckets)
            self.buckets.append(self._bucket(stage, matrices_first(parameters)))
            is_shared = any(num_stages_of[id(each)] > 1 for each in parameters)  # another stage may add to it
            # The last one can hardly be complete before the stage is done.
            if self._dp.size > 1 and parameters is not lists[-1] and not is_shared:
                self._readiness[place] = Readiness(stage, parameters, partial(self._are_ready, [place]))

    def _bucket(self, stage: int | None, parameters: Sequence[nn.Parameter]) -> Bucket:
        def registered(numel: int, dtype: torch.dtype) -> torch.Tensor:
            return self._mesh.world.empty(numel, dtype=dtype)

        def private(numel: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(numel, dtype=dtype, device=parameters[0].device)

        with torch.inference_mode(False):
            if self._dp.size == 1 and stage is not None:
                return LooseBucket(stage, parameters)
            new_weights = registered if self.is_sharded else private  # peers read none of it otherwise
            return FlatBucket(stage, parameters, self._dp.size, new_weights, registered)

    @property
    def gradient_bytes(self) -> int:
        """That gradients take, once they are there."""
        return sum(
            bucket.flat_gradients.nbytes if isinstance(bucket, FlatBucket) else sum(p.nbytes for p in bucket.parameters)
            for bucket in self.buckets
        )

    def flat_late(self, parameters: Collection[nn.Parameter]) -> list[torch.Tensor]:
        """The gradients of these late parameters, as few flat tensors: neighbours, as they were given, are one."""
        wanted, late = set(map(id, parameters)), self.buckets[self._num_early :]
        return [
            bucket.flat_gradients[start:stop]
            for bucket in late
            if isinstance(bucket, FlatBucket)
            for start, stop in bucket.ranges(lambda each: id(each) in wanted, bucket.bounds(None))
        ]

    # In the engine thread.

    def begin(self) -> None:
        """A new step: no parameter has a gradient."""
        if not self._step.is_over:
            raise InvalidCall("begin: the step before was neither finished nor cancelled.")
        self._step = _Step()
        self._ready = [False] * self._num_early
        for parameter in self.parameters:
            parameter.grad = None
            parameter.cast_in_step = None  # type: ignore[attr-defined]
        for readiness in self._readiness.values():
            readiness.begin()
        self.release()

    @contextlib.contextmanager
    def last_backward(self, stage: int, *, split: bool = False) -> Iterator[None]:
        """Around a stage's last backward; `split`: around its weight part. Buckets that are complete start in here."""
        opened = [each for each in self._readiness.values() if each.stage == stage]
        for each in opened:
            each.open(split=split)
        yield
        for each in opened:
            each.close()

    def stage_done(self, stage: int) -> None:
        """Nothing more will be added to this stage's gradients in this step."""
        self._step.done.add(stage)
        self._are_ready(
            [place for place, bucket in enumerate(self.buckets[: self._num_early]) if bucket.stage == stage]
        )
        if self._step.done == set(self._order):
            for bucket in self.buckets[self._num_early :]:
                bucket.bring_home()

    def _are_ready(self, places: Sequence[int]) -> None:
        for place in places:
            self._ready[place] = True
        step, first = self._step, self._step.num_home
        while step.num_home < self._num_early and self._ready[step.num_home]:
            self.buckets[step.num_home].bring_home()
            if step.num_home in self._readiness:
                self._readiness[step.num_home].has_started = True
            step.num_home += 1
        if self._dp.size > 1 and step.num_home > first:
            self._loop.call_soon_threadsafe(self._reduce, step)

    # On the event loop.

    def _reduce(self, step: _Step) -> None:
        """Start what is complete and has not started yet."""
        try:
            while len(step.works) < step.num_home and not step.is_over and step.failure is None:
                step.works.append(self._reduction(self.buckets[len(step.works)]))
        except Exception as failure:  # it belongs to whoever waits for the step, not to the loop
            step.failure = failure

    def _reduction(self, bucket: Bucket) -> Work:
        assert isinstance(bucket, FlatBucket)
        if not self.is_sharded:
            return self._dp.all_reduce(bucket.flat_gradients, op="sum")
        return self._dp.reduce_scatter(bucket.flat_gradients, op="sum", out=bucket.gradients(self._dp.rank)[0])

    async def finish(self) -> None:
        """Once the engine's part has ended: until every gradient is the sum over the replicas, or this rank's slice of
        it is."""
        step = self._step
        if step.is_over:
            raise InvalidCall("finish: no step is under way.")
        if left := [stage for stage in self._order if stage not in step.done]:
            raise InvalidCall(f"finish: the stages {left} are not done.")
        try:
            if self._num_early < len(self.buckets) and self._settle_late is not None:
                await self._settle_late()
                self.settled = time.monotonic()
            step.num_home = len(self.buckets)
            if self._dp.size > 1:
                self._reduce(step)
            self.reduced = await self._all_reduced(step)
        except BaseException as error:
            self.cancel(error)
            raise
        self._end(step)

    async def _all_reduced(self, step: _Step) -> Reduced:
        num_bytes, seconds, last = 0, 0.0, 0.0
        for work in step.works:
            num_bytes += (await work).nbytes
            ended = work.ended_at()
            seconds += max(0.0, ended - max(work.began, last))
            last = ended
        if step.failure is not None:
            raise step.failure
        return Reduced(num_bytes * self._dp.size if self.is_sharded else num_bytes, seconds)

    @property
    def bus_bandwidth(self) -> float | None:
        """Of the last step's reductions, in 10⁹ bytes a second, as collective benchmarks count: what each rank has to
        send and receive at least. None where there were none."""
        if not self.reduced.seconds:
            return None
        rounds = 1 if self.is_sharded else 2  # an all-reduce is a reduce-scatter and an all-gather
        return self.reduced.num_bytes * rounds * (self._dp.size - 1) / self._dp.size / self.reduced.seconds / 1e9

    def cancel(self, error: BaseException | None = None) -> None:
        """Give up the step that is under way: other replicas, which wait for this one's gradients, are told why, and
        their group is closed. Nothing, if no step is under way. Call it when the engine's part has ended."""
        step = self._step
        if step.is_over:
            return
        self._end(step)
        if self._dp.size > 1:
            self._dp.abort(self._mesh.abort_reason(error))

    def _end(self, step: _Step) -> None:
        step.is_over = True
        for parameter in self.parameters:  # the weights are about to change
            if hasattr(parameter, "cast_in_step"):
                del parameter.cast_in_step

    def release(self) -> None:
        """Let go of the gradients as they were on this rank alone."""
        for bucket in self.buckets:
            bucket.strays = ()


def _owners(
    stages: Mapping[int, Sequence[nn.Parameter]], order: Sequence[int]
) -> tuple[dict[int, int], dict[int, int]]:
    """For each parameter, by its id: the stage that is done last with it, and the number of those that have it."""
    owner, num_stages_of = {}, dict[int, int]()
    for stage in order:
        for each in {id(parameter) for parameter in stages[stage]}:
            owner[each] = stage
            num_stages_of[each] = num_stages_of.get(each, 0) + 1
    return owner, num_stages_of


def _trained(parameters: Collection[nn.Parameter]) -> list[nn.Parameter]:
    """Those that need a gradient, each once."""
    return list({id(each): each for each in parameters if each.requires_grad}.values())
