"""What a rule is and what it finds; numbers near a wrong one that would be valid."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from parallel3d.config.errors import enumerate_words
from parallel3d.config.sections import RunConfig


@dataclass(frozen=True, slots=True)
class Finding:
    """A broken rule. blame: the keys involved; the error names the first that was given, overrides first."""

    blame: tuple[str, ...]
    message: str
    remedy: str


Check = Callable[[RunConfig, int | None], Iterator[Finding]]


@dataclass(frozen=True, slots=True)
class Rule:
    """A check and the keys it reads; skipped while one of them is invalid by itself."""

    check: Check
    reads: tuple[str, ...]


def near_multiples(value: int, step: int) -> str:
    """`8 or 12`: the multiples of `step` on both sides of `value`, which is none itself."""
    below, above = value // step * step, (value // step + 1) * step
    return enumerate_words([str(number) for number in (below, above) if number])


def near_divisors(value: int, near: int) -> str:
    """`2 or 4`: the divisors of `value` on both sides of `near`, which is none itself."""
    divisors = sorted({d for low in range(1, math.isqrt(value) + 1) if value % low == 0 for d in (low, value // low)})
    below, above = [d for d in divisors if d < near][-1:], [d for d in divisors if d > near][:1]
    return enumerate_words([str(number) for number in (*below, *above)])
