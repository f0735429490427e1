"""One step's sums: pieces of gradients in, averages weighted by samples out. Pure: no I/O, no clock.

Each worker's elements of a key arrive in order. For example, after parts of three workers' gradients:

worker 0 ████████████████████          the first to reach an element assigns it,
worker 1 ███████████████               others add to it,
worker 2 ████████                      and the last writes the average
average  ████████
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from runtime.gradient_server.arithmetic import Arithmetic, Array
from runtime.gradient_server.buffers import Buffers, Key, Memory, OverLimit, Shape
from runtime.gradient_server.sample_shares import Share
from runtime.gradient_server.wire.messages import MAX_PARTS, Component, Dtype, Reason, WireError

WHOLE: Key = ("whole", 0)


def block(number: int) -> Key:
    return "block", number


def component(number: int) -> Key:
    return "component", number


def part(number: int) -> Key:
    return "part", number


_KINDS = {"whole": ("whole",), "blocks": ("block", "component"), "parts": ("part",)}


class GradientRefused(WireError):
    """What this worker sent cannot be part of the sum. What it added before stays in it."""

    def __init__(self, reason: Reason, detail: str, worker: int) -> None:
        super().__init__(reason, detail)
        self.args, self.worker = (reason, detail, worker), worker


@dataclass(frozen=True, slots=True)
class Plan:
    """Which keys a step has: `whole`, or `number` `blocks` and the three components, or `number` `parts`."""

    kind: str
    number: int = 1

    def has(self, key: Key) -> bool:
        return key[0] in _KINDS[self.kind]

    @property
    def num_keys(self) -> int:
        return self.number + len(Component) if self.kind == "blocks" else self.number

    @property
    def needs_reports(self) -> bool:
        """Workers that send blocks need not report their loss."""
        return self.kind != "blocks"


@dataclass(slots=True)
class _KeySum:
    memory: Memory
    first: int
    """The worker that defined the shape."""
    positions: dict[int, int] = field(default_factory=dict)
    """How many elements each worker has sent; only workers that have begun."""
    reached: int = 0
    """How many elements were assigned by the first worker to reach them."""
    averaged: int = 0
    ended: set[int] = field(default_factory=set)


class StepSum:
    """The sums of one attempt at a step. `shares`: the samples of each participating worker."""

    def __init__(self, step: int, attempt: int, shares: Mapping[int, Share], buffers: Buffers | None = None) -> None:
        self.step, self.attempt, self.shares = step, attempt, dict(shares)
        self.is_dropped = False
        """Whether the attempt was given up: its averages are not sent any more."""
        self.plan: Plan | None = None
        self._planners: set[int] = set()
        self._buffers = buffers or Buffers()
        self._arithmetic = Arithmetic()
        divisor = math.gcd(*(share.length for share in shares.values())) or 1
        # With even shares every weight is 1, which needs no multiplication.
        self._weights = {worker: share.length // divisor for worker, share in self.shares.items()}
        self._keys: dict[Key, _KeySum] = {}
        self._complete: set[Key] = set()
        self._reports: dict[int, tuple[float, int, int]] = {}

    # Input.

    def settle(self, worker: int, plan: Plan) -> None:
        """Set which keys this worker will send; all workers must send the same."""
        if plan.number > MAX_PARTS:
            raise GradientRefused(Reason.TOO_LONG, f"{plan.number} {plan.kind}, of at most {MAX_PARTS}.", worker)
        if self.plan is None:
            self._check_first(worker, plan)
            self.plan = plan
        if plan.kind != self.plan.kind:
            raise GradientRefused(
                Reason.UNEXPECTED, f"{plan.kind} in a step that others send as {self.plan.kind}.", worker
            )
        self._check_number(worker, plan, self.plan.number, "other workers have")
        self._planners.add(worker)

    def _check_number(self, worker: int, plan: Plan, expected: int, whose: str) -> None:
        if plan.number != expected:
            reason = Reason.WRONG_BLOCK if plan.kind == "blocks" else Reason.WRONG_SIZES
            raise GradientRefused(reason, f"{plan.number} {plan.kind} where {whose} {expected}.", worker)

    def _check_first(self, worker: int, plan: Plan) -> None:
        """Check the first plan against earlier steps, and against keys that other workers sent without a plan."""
        earlier = self._buffers.num_settled(_KINDS[plan.kind][0])
        if earlier:
            self._check_number(worker, plan, earlier, "earlier steps had")
        if any(not plan.has(key) for key in self._keys):
            raise GradientRefused(Reason.UNEXPECTED, f"{plan.kind} in a step that others send as blocks.", worker)
        others = self._reports.keys() - {worker}
        if plan.kind == "whole" and others:
            detail = f"the gradient: elements where worker {min(others)} had none."
            raise GradientRefused(Reason.WRONG_LENGTH, detail, worker)

    def begin(
        self, worker: int, key: Key, count: int, dtype: Dtype = Dtype.FLOAT32, sizes: tuple[int, ...] = ()
    ) -> None:
        """Start a key: `count` elements of this worker will follow."""
        if self.plan is not None and not self.plan.has(key):
            raise GradientRefused(
                Reason.UNEXPECTED, f"{_name(key)} in a step that others send as {self.plan.kind}.", worker
            )
        shape = Shape(count, dtype, sizes)
        key_sum = self._keys.get(key)
        if key_sum is None:
            self._check_shape(worker, key, shape, self._buffers.settled(key), "earlier steps")
            key_sum = self._keys[key] = _KeySum(self._take(worker, key, shape), worker)
        else:
            self._check_shape(worker, key, shape, key_sum.memory.shape, f"worker {key_sum.first}")
        if worker not in self._weights or worker in key_sum.positions:
            raise GradientRefused(
                Reason.UNEXPECTED, f"{_name(key)} a second time, or from a worker without a share.", worker
            )
        key_sum.positions[worker] = 0

    def _check_shape(self, worker: int, key: Key, shape: Shape, expected: Shape | None, whose: str) -> None:
        if expected is None or shape == expected:
            return
        if shape.dtype is not expected.dtype:
            reason, found, wanted = Reason.BAD_DTYPE, shape.dtype.name.lower(), expected.dtype.name.lower()
        elif shape.count != expected.count:
            reason, found, wanted = Reason.WRONG_LENGTH, f"{shape.count} elements", f"{expected.count}"
        else:
            reason, found, wanted = Reason.WRONG_SIZES, f"sizes {shape.sizes}", f"{expected.sizes}"
        raise GradientRefused(reason, f"{_name(key)}: {found} where {whose} had {wanted}.", worker)

    def _take(self, worker: int, key: Key, shape: Shape) -> Memory:
        try:
            return self._buffers.take(key, shape)
        except OverLimit as error:
            raise GradientRefused(
                Reason.OVER_BUDGET, f"{_name(key)} of {shape.count} elements: {error}.", worker
            ) from None

    def add(self, worker: int, key: Key, offset: int, values: Array) -> None:
        """Add the worker's next elements; `values` is not kept. If any is refused, none is added."""
        key_sum = self._begun(worker, key)
        shape, end = key_sum.memory.shape, offset + len(values)
        if offset != key_sum.positions[worker] or end > shape.count:
            at, most = key_sum.positions[worker], shape.count
            raise GradientRefused(
                Reason.WRONG_LENGTH, f"{_name(key)}: elements {offset} to {end} after {at} of {most}.", worker
            )
        weight = self._weights[worker]
        if weight and not self._arithmetic.is_finite(values, shape.dtype):
            raise GradientRefused(Reason.NOT_FINITE, f"{_name(key)} from element {offset} on.", worker)
        key_sum.positions[worker] = end
        if weight:
            self._sum(key_sum, offset, values, weight)
        else:
            self._average(key_sum)

    def _sum(self, key_sum: _KeySum, offset: int, values: Array, weight: int) -> None:
        end, reached = offset + len(values), key_sum.reached
        last = max(offset, self._whole(key_sum))  # up to here all workers have sent
        edges: tuple[int, ...] = (offset, end)
        if offset < last < end or offset < reached < end:
            edges = tuple(sorted({offset, last, end, min(end, max(offset, reached))}))
        for begin, stop in pairwise(edges):
            self._add_run(key_sum, begin, stop, values[begin - offset : stop - offset], weight, is_last=stop <= last)
        key_sum.reached = max(reached, end)
        if last > offset:
            key_sum.averaged = last

    def _whole(self, key_sum: _KeySum) -> int:
        """The number of leading elements that all workers have sent."""
        positions = key_sum.positions
        return min(positions.values()) if len(positions) == len(self._weights) else 0

    def _add_run(self, key_sum: _KeySum, begin: int, stop: int, values: Array, weight: int, *, is_last: bool) -> None:
        """Add elements for which this worker is uniformly the first, a middle one, or the last."""
        memory, dtype = key_sum.memory, key_sum.memory.shape.dtype
        sums, is_first = memory.sums[begin:stop], begin >= key_sum.reached
        if is_last:
            before = None if is_first else sums
            self._arithmetic.finish(memory.result[begin:stop], before, values, weight, self._total_weight, dtype)
        elif is_first:
            self._arithmetic.assign(sums, values, weight, dtype)
        else:
            self._arithmetic.add(sums, values, weight, dtype)

    def _average(self, key_sum: _KeySum) -> None:
        """Average what is complete without a last addition: its worker has no samples, or was left out."""
        begin, end = key_sum.averaged, self._whole(key_sum)
        if end > begin:
            memory, total = key_sum.memory, self._total_weight
            if total:
                self._arithmetic.average(memory.result[begin:end], memory.sums[begin:end], total, memory.shape.dtype)
            else:  # no remaining worker has samples
                memory.result[begin:end] = 0
            key_sum.averaged = end

    @property
    def _total_weight(self) -> int:
        return sum(self._weights.values())

    def end(self, worker: int, key: Key) -> bool:
        """The worker has sent all of a key. True if all workers have."""
        key_sum = self._begun(worker, key)
        if key_sum.positions[worker] != key_sum.memory.shape.count:
            at, most = key_sum.positions[worker], key_sum.memory.shape.count
            raise GradientRefused(Reason.WRONG_LENGTH, f"{_name(key)} ends after {at} of {most} elements.", worker)
        key_sum.ended.add(worker)
        return self._note_complete(key)

    def _begun(self, worker: int, key: Key) -> _KeySum:
        key_sum = self._keys.get(key)
        if key_sum is None or worker not in key_sum.positions:
            raise GradientRefused(Reason.UNEXPECTED, f"{_name(key)}, which was not begun.", worker)
        return key_sum

    def _note_complete(self, key: Key) -> bool:
        is_complete = self._weights.keys() <= self._keys[key].ended
        if is_complete:
            self._complete.add(key)
        return is_complete

    def report(self, worker: int, loss: float, correct: int, total: int) -> None:
        """Record a worker's result: the mean loss, and the numbers of correct and of all samples."""
        if worker not in self._weights or worker in self._reports:
            raise GradientRefused(Reason.UNEXPECTED, "a loss a second time, or from a worker without a share.", worker)
        if total != self.shares[worker].length:
            expected = self.shares[worker]
            raise GradientRefused(
                Reason.WRONG_TOTAL,
                f"{total} samples where [{expected.start}, {expected.end}) are {expected.length}.",
                worker,
            )
        self._reports[worker] = (loss, correct, total)

    def leave_out(self, worker: int) -> list[Key]:
        """Go on without a worker that has added nothing. Returns the keys that this completes."""
        assert not self.has_from(worker)
        self._weights.pop(worker, None)
        self._reports.pop(worker, None)
        self._planners.discard(worker)
        self.plan = self.plan if self._planners else None
        before = set(self._complete)
        for key, key_sum in list(self._keys.items()):
            key_sum.positions.pop(worker, None)
            if not key_sum.positions:
                del self._keys[key]
            else:
                self._average(key_sum)  # now, because later additions average only their own elements
                self._note_complete(key)
        return sorted(self._complete - before)

    # Output.

    def has_from(self, worker: int) -> bool:
        """Whether elements of this worker are part of the sums."""
        return self._weights.get(worker, 0) > 0 and any(
            each.positions.get(worker, 0) > 0 for each in self._keys.values()
        )

    def has_all_of(self, worker: int) -> bool:
        """Whether the worker has sent its whole gradient, and its loss if that is needed."""
        if self.plan is None or (self.plan.needs_reports and worker not in self._reports):
            return False
        return sum(worker in key_sum.ended for key_sum in self._keys.values()) == self.plan.num_keys

    def average(self, key: Key) -> Array:
        """The average in the key's dtype; bfloat16 as 16-bit integers. The next step reuses its memory."""
        assert key in self._complete
        return self._keys[key].memory.result

    @property
    def keys(self) -> frozenset[Key]:
        """The complete keys."""
        return frozenset(self._complete)

    def has_come(self, worker: int, key: Key) -> bool:
        """Whether all elements of the worker have arrived, but `end` was not called."""
        key_sum = self._begun(worker, key)
        return key_sum.positions[worker] == key_sum.memory.shape.count and worker not in key_sum.ended

    def shape_from(self, worker: int, key: Key) -> Shape:
        """The shape of a key that this worker has begun."""
        return self._begun(worker, key).memory.shape

    def shape(self, key: Key) -> Shape:
        return self._keys[key].memory.shape

    @property
    def has_all_reports(self) -> bool:
        return self._weights.keys() <= self._reports.keys()

    @property
    def is_complete(self) -> bool:
        """Whether all keys of the plan are averaged and the required losses reported."""
        if self.plan is None or len(self._complete) < self.plan.num_keys:
            return False
        return self.has_all_reports or not self.plan.needs_reports

    @property
    def loss(self) -> float:
        """The mean over all reported samples; NaN if there are none."""
        counted = [(loss * total, total) for loss, _, total in self._reports.values() if total]
        return sum(each for each, _ in counted) / sum(total for _, total in counted) if counted else math.nan

    @property
    def correct(self) -> int:
        return sum(correct for _, correct, _ in self._reports.values())

    @property
    def total(self) -> int:
        return sum(total for _, _, total in self._reports.values())


def _name(key: Key) -> str:
    kind, number = key
    if kind == "whole":
        return "the gradient"
    return Component(number).name.lower() if kind == "component" else f"{kind} {number}"
