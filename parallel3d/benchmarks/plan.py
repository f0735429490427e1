"""The plan of a `bench collectives` run, parsed from its options and checked before any process starts."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from parallel3d.benchmarks.worker import largest_sum
from parallel3d.formatting import parse_sizes, show_size
from process_groups.arena import available_memory
from process_groups.arguments import REDUCIBLE, STRATEGIES
from runtime.errors import InvalidCall

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in REDUCIBLE}
SIZES = "4,4KiB,64KiB,1MiB,16MiB,64MiB,256MiB"
QUICK_SIZES = "4,64KiB,1MiB,16MiB"
ROUNDS, QUICK_ROUNDS = 5, 3
_TURNS_AND_CALLS = {64 << 10: (7, 40), 1 << 20: (7, 20), 16 << 20: (3, 8), 64 << 20: (5, 2), math.inf: (2, 2)}
"""{largest size in bytes: (turns per round, calls per turn)}. 64 MiB gets more turns than its neighbours because its
times vary most: half of it fits a cache."""
_EXACT_UP_TO = {"int8": 127, "uint8": 255, "bfloat16": 1 << 8, "float16": 1 << 11}
# Memory per rank, in tensor sizes: the tensor itself and one more, which some MPI algorithms allocate during a call and
# our ranks use for the unregistered tensor. Only one contestant's ranks hold tensors at a time.
_COPIES = 2


@dataclass(frozen=True, slots=True)
class Plan:
    """The sizes, ranks and repeats of one benchmark run."""

    ranks: tuple[int, ...]
    """Numbers of ranks; each is measured separately."""
    sizes: tuple[int, ...]
    strategies: tuple[str, ...]
    dtype: str = "float32"
    rounds: int = ROUNDS
    quick: bool = False

    @property
    def element_size(self) -> int:
        return DTYPES[self.dtype].itemsize

    def repeats(self, num_bytes: int) -> int:
        """Calls in one turn, the same for every contestant."""
        return _turns_and_calls(num_bytes)[1]

    def turns(self, num_bytes: int) -> int:
        """Turns of each contestant in one round; the round's value is their median."""
        return 1 if self.quick else _turns_and_calls(num_bytes)[0]


def _turns_and_calls(num_bytes: int) -> tuple[int, int]:
    return next(found for most, found in _TURNS_AND_CALLS.items() if num_bytes <= most)


def make_plan(
    ranks: Iterable[str],
    sizes: str | None,
    strategies: str | None,
    dtype: str,
    rounds: int | None,
    quick: bool,
) -> Plan:
    """Make the plan from command-line options. Raises InvalidCall, which names the wrong option and the remedy."""
    if dtype not in DTYPES:
        raise InvalidCall(f"--dtype {dtype!r} is not one of {', '.join(DTYPES)}.")
    if rounds is not None and rounds < 1:
        raise InvalidCall(f"--rounds {rounds}: at least one round is needed.")
    plan = Plan(
        ranks=_parse_ranks(ranks),
        sizes=parse_sizes(sizes if sizes is not None else QUICK_SIZES if quick else SIZES),
        strategies=_parse_strategies(strategies),
        dtype=dtype,
        rounds=rounds or (QUICK_ROUNDS if quick else ROUNDS),
        quick=quick,
    )
    _check_elements(plan)
    _check_sums(plan)
    _check_memory(plan, available_memory())
    return plan


def _parse_ranks(words: Iterable[str]) -> tuple[int, ...]:
    found = []
    for word in (part.strip() for words_of_one in words for part in words_of_one.split(",")):
        if not word.isdecimal():
            raise InvalidCall(f"--ranks {word!r} is not a number of ranks such as 2 or 2,4,8.")
        if int(word) < 2:
            raise InvalidCall(f"--ranks {word}: a collective needs at least 2 ranks.")
        found.append(int(word))
    return tuple(dict.fromkeys(found))


def _parse_strategies(text: str | None) -> tuple[str, ...]:
    chosen = STRATEGIES if text is None else tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in chosen:
        if name not in STRATEGIES:
            raise InvalidCall(f"--strategies {name!r} is not one of {', '.join(STRATEGIES)}.")
    return chosen


def _check_elements(plan: Plan) -> None:
    for size in plan.sizes:
        if size % plan.element_size:
            below = size // plan.element_size * plan.element_size
            near = f"{below} or {below + plan.element_size}" if below else str(plan.element_size)
            raise InvalidCall(
                f"--sizes {size}: a {plan.dtype} has {plan.element_size} bytes, and {size} is no multiple. Give {near}."
            )


def _check_sums(plan: Plan) -> None:
    most, exact = max(plan.ranks), _EXACT_UP_TO.get(plan.dtype)
    if exact is not None and largest_sum(most) > exact:
        raise InvalidCall(
            f"--ranks {most}: {plan.dtype} is exact up to {exact}, too little to check the sums of so many. "
            f"Ask for {exact // largest_sum(1)} at most, or for another --dtype."
        )


def _check_memory(plan: Plan, available: int) -> None:
    most, largest = max(plan.ranks), max(plan.sizes)
    needed = _COPIES * most * largest
    if needed > available:
        raise InvalidCall(
            f"--sizes {show_size(largest)} with {most} ranks needs {show_size(needed)} of memory, and "
            f"{show_size(available)} are available. Leave out the largest size, or ask for fewer ranks."
        )


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of this name, a key of `DTYPES`."""
    return DTYPES[name]
