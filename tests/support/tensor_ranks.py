"""Tensor-parallel ranks for tests: threads of this process that exchange tensors through shared memory, and what an
exchange has to do wherever its ranks are."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch

from process_groups.arena import Arena, open_peer
from process_groups.call import Place
from process_groups.counters import Patience
from process_groups.shared_memory.exchange import Exchange
from process_groups.shared_memory.layout import lay_out
from process_groups.shared_memory.tensor_exchange import SharedTensorExchange
from process_groups.tensor_exchange import Outcome, TensorExchange
from runtime.errors import CommunicationError, Coords
from tests.support.processes import SECONDS


class ThreadRanks:
    """As many exchanges as ranks, each for a thread of its own."""

    def __init__(self, size: int, timeout: float = SECONDS) -> None:
        layout = lay_out([size])[0]
        self.arenas = [Arena(layout.stop, size) for _ in range(size)]
        self.trouble: CommunicationError | None = None
        places = [Place(rank, Coords(0, rank, 0)) for rank in range(size)]
        self.shared = [self._map(me, layout) for me in range(size)]
        self.given_up: list[CommunicationError] = []
        self.exchanges = [
            SharedTensorExchange(
                each, "tp", places, Patience(0, 5), timeout, lambda: self.trouble, self.given_up.append
            )
            for each in self.shared
        ]

    def _map(self, me: int, layout: Any) -> Exchange:
        arenas = [each if rank == me else open_peer(each.address_for_peers) for rank, each in enumerate(self.arenas)]
        return Exchange(arenas, me, layout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for arena in self.arenas:
            arena.close()

    def run(self, work: Callable[[SharedTensorExchange], Any], ranks: Sequence[int] | None = None) -> list[Any]:
        """What the work gives on each rank; the first error that is not a consequence of another is raised."""
        chosen = range(len(self.exchanges)) if ranks is None else ranks
        outcomes: dict[int, Any] = {}

        def live(rank: int) -> None:
            try:
                outcomes[rank] = work(self.exchanges[rank])
            except BaseException as error:
                outcomes[rank] = error
                self.shared[rank].give_up()

        threads = [threading.Thread(target=live, args=(rank,)) for rank in chosen]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * SECONDS)
            assert not thread.is_alive()
        errors = [each for each in outcomes.values() if isinstance(each, BaseException)]
        for error in sorted(errors, key=lambda each: isinstance(each, CommunicationError)):
            raise error
        return [outcomes[rank] for rank in chosen]


def num_exchanges(exchange: TensorExchange) -> int:
    """That this rank has finished."""
    return sum(each.calls for each in exchange.moved.values())


def in_threads(size: int, work: Callable[[SharedTensorExchange], Any]) -> list[Any]:
    """Run the work on ranks that are threads."""
    with ThreadRanks(size) as ranks:
        return ranks.run(work)


CASES = (
    *((shape, torch.float32) for shape in ((1,), (4,), (3, 4, 5), (2, 12, 300), (12, 0, 2))),
    *(((2, 12), dtype) for dtype in (torch.float64, torch.bfloat16, torch.float16)),
)


def part(rank: int, shape: Sequence[int], dtype: torch.dtype, number: int) -> torch.Tensor:
    """What a rank gives to an exchange: every one can tell every other's."""
    generator = torch.Generator().manual_seed(1000 * number + rank)
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float64).to(dtype)


def expected(
    outcome: Outcome, dim: int, rank: int, size: int, shape: Sequence[int], dtype: torch.dtype, number: int
) -> torch.Tensor:
    """In rank order, 16-bit numbers in float32."""
    parts = [part(each, shape, dtype, number) for each in range(size)]
    if outcome is Outcome.ALL_GATHER:
        return torch.cat(parts, dim)
    wide = torch.float32 if dtype.itemsize == 2 else dtype
    total = parts[0].to(wide)
    for each in parts[1:]:
        total = total + each.to(wide)
    total = total.to(dtype)
    return total if outcome is Outcome.ALL_REDUCE else total.chunk(size, dim)[rank]


def check_exchanges(exchange: TensorExchange, *, in_rank_order: bool = True) -> None:
    """All outcomes of all shapes and dtypes, again and again; in every rank's own thread."""
    rank, size, results = exchange.rank, exchange.size, []
    asked = [
        (shape, dtype, outcome, dim)
        for shape, dtype in CASES
        for dim in range(len(shape))
        for outcome in Outcome
        if outcome is not Outcome.REDUCE_SCATTER or shape[dim] % size == 0
    ]
    for number, (shape, dtype, outcome, dim) in enumerate(2 * asked):
        exchange.room(shape, dtype).copy_(part(rank, shape, dtype, number))
        exchange.post(outcome, dim)
        results.append((exchange.result(), expected(outcome, dim, rank, size, shape, dtype, number)))
    for found, wanted in results:  # at the end: results are private, and nothing has been written over them
        assert found.shape == wanted.shape
        assert found.dtype is wanted.dtype
        if in_rank_order:
            assert torch.equal(found, wanted)
        else:
            allowed = 0.05 if found.dtype.itemsize == 2 else 1e-6
            torch.testing.assert_close(found, wanted, rtol=1e-6, atol=allowed)
    assert exchange.waited >= 0.0
