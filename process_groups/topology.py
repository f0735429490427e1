"""Rank mesh arithmetic: which rank sits where, and who its neighbours are. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import permutations, product
from math import prod

from runtime.errors import Coords, InvalidCall

AXES = ("dp", "tp", "pp")
ORDERS = tuple("-".join(axes) for axes in permutations(AXES))


def auto_order(tp: int, pp: int, ranks_per_host: int) -> str:
    """A whole replica inside a host if it fits there; otherwise at least its tensor-parallel groups."""
    return "dp-tp-pp" if tp * pp <= ranks_per_host else "pp-dp-tp"


@dataclass(frozen=True, slots=True)
class Topology:
    """rank ↔ (dp, tp, pp), for an order string such as `dp-tp-pp` (slowest to fastest) or a table.

    2 x 2 x 2 in the order dp-tp-pp:

    rank     0    1    2    3    4    5    6    7
    dp tp pp 000  001  010  011  100  101  110  111
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    order: str = "dp-tp-pp"
    table: tuple[Coords, ...] | None = None
    """Coordinates of rank 0, 1, …; overrides `order`."""

    _strides: Coords = field(init=False, repr=False, compare=False)
    _rank_in_table: dict[Coords, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for axis, size in zip(AXES, self.shape, strict=True):
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise InvalidCall(f"{axis} = {size!r}: the size of an axis is a whole number from 1 up.")
        if self.order not in ORDERS:
            raise InvalidCall(f"order = {self.order!r}: give one of {', '.join(ORDERS)}, or a table.")
        object.__setattr__(self, "_strides", self._find_strides())
        object.__setattr__(self, "_rank_in_table", self._check_table())

    def _find_strides(self) -> Coords:
        strides, stride = {}, 1
        for axis in reversed(self.order.split("-")):
            strides[axis] = stride
            stride *= getattr(self, axis)
        return Coords(**strides)

    def _check_table(self) -> dict[Coords, int]:
        if self.table is None:
            return {}
        rank_of = {Coords(*coords): rank for rank, coords in enumerate(self.table)}
        wanted = {Coords(*c) for c in product(*map(range, self.shape))}
        if len(self.table) != self.world_size or rank_of.keys() != wanted:
            wrong = next(iter(rank_of.keys() - wanted), None) or next(iter(wanted - rank_of.keys()), None)
            about = f"; look at ({wrong})" if wrong is not None else ""
            raise InvalidCall(
                f"order: the table has {len(self.table)} rows for {self.world_size} ranks; each coordinate of "
                f"dp({self.dp}) x tp({self.tp}) x pp({self.pp}) must stand there exactly once{about}."
            )
        return rank_of

    @property
    def shape(self) -> Coords:
        """The size of each axis."""
        return Coords(self.dp, self.tp, self.pp)

    @property
    def world_size(self) -> int:
        return prod(self.shape)

    def coords(self, rank: int) -> Coords:
        """Where a rank sits."""
        self._check_rank(rank)
        if self.table is not None:
            return Coords(*self.table[rank])
        return Coords(*(rank // s % n for s, n in zip(self._strides, self.shape, strict=True)))

    def rank(self, coords: Sequence[int]) -> int:
        """Who sits at (dp, tp, pp)."""
        at = Coords(*coords)
        for axis, here, size in zip(AXES, at, self.shape, strict=True):
            if not 0 <= here < size:
                raise InvalidCall(f"({at}) is outside the mesh: {axis} goes from 0 to {size - 1}.")
        if self.table is not None:
            return self._rank_in_table[at]
        return sum(here * stride for here, stride in zip(at, self._strides, strict=True))

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise InvalidCall(f"rank {rank} is outside the mesh: ranks go from 0 to {self.world_size - 1}.")

    def group(self, axis: str, rank: int) -> tuple[int, ...]:
        """The ranks that differ from `rank` along `axis` only, in the order of that axis."""
        here = self.coords(rank)
        return tuple(self.rank(here._replace(**{axis: i})) for i in range(getattr(self, axis)))

    def groups(self, axis: str) -> list[tuple[int, ...]]:
        """Every group of an axis, in the order of their first members."""
        firsts = (c for c in map(self.coords, range(self.world_size)) if getattr(c, axis) == 0)
        return [self.group(axis, self.rank(coords)) for coords in firsts]

    def next_stage(self, rank: int) -> int | None:
        """Who gets this rank's activations; None at the last stage."""
        return self._stage(rank, +1)

    def previous_stage(self, rank: int) -> int | None:
        """Who sends this rank its activations; None at the first stage."""
        return self._stage(rank, -1)

    def _stage(self, rank: int, step: int) -> int | None:
        here = self.coords(rank)
        at = here.pp + step
        return self.rank(here._replace(pp=at)) if 0 <= at < self.pp else None

    def is_first_stage(self, rank: int) -> bool:
        return self.coords(rank).pp == 0

    def is_last_stage(self, rank: int) -> bool:
        return self.coords(rank).pp == self.pp - 1

    def crossing(self, axis: str, host_of: Sequence[str]) -> list[tuple[int, ...]]:
        """The groups of an axis whose members sit on more than one host."""
        return [ranks for ranks in self.groups(axis) if len({host_of[r] for r in ranks}) > 1]
