"""Cuts of a row of layers into stages: how many layers each stage gets. Pure numbers, no torch.

layers   0 1 2 | 3 4 | 5 6      a cut of 7 layers into 3 stages: (3, 2, 2)
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import accumulate, permutations, takewhile
from math import inf, isfinite

from runtime.errors import InvalidCall

Cut = tuple[int, ...]
"""Layers of each stage, first stage first; none is 0."""
StageCosts = Sequence[Sequence[float]]
"""`costs[first][n - 1]` is what a stage of `n` layers costs that begins with layer `first`. A stage never gets cheaper
by one layer more: the search relies on that."""

# Longer examples explain nothing.
_LONGEST_EXAMPLE = 16


def even_cut(layers: int, stages: int) -> Cut:
    """Numbers that differ by at most one; the first stages have more."""
    _refuse_too_few(layers, stages)
    each, over = divmod(layers, stages)
    return tuple(each + (stage < over) for stage in range(stages))


def given_cut(numbers: Sequence[int], layers: int, stages: int) -> Cut:
    """The numbers, if they are a cut of that many layers into that many stages."""
    _refuse_too_few(layers, stages)
    problem = _problem(numbers, layers, stages)
    if problem is not None:
        remedy = f"Give {_count(stages, 'number')} that add up to {layers}{example_cut(layers, stages)}."
        raise InvalidCall(f"layers_per_stage = {list(numbers)}: {problem}. {remedy}")
    return tuple(numbers)


def _problem(numbers: Sequence[int], layers: int, stages: int) -> str | None:
    if len(numbers) != stages:
        return f"layers of {_count(len(numbers), 'stage')}, but there are {stages}"
    for stage, number in enumerate(numbers):
        if type(number) is not int or number < 1:
            return f"stage {stage} gets {number!r} layers, but each needs a whole number, 1 or more"
    if sum(numbers) != layers:
        return f"adds up to {_count(sum(numbers), 'layer')}, but the model has {layers}"
    return None


def example_cut(layers: int, stages: int) -> str:
    """The end of a remedy that says which numbers would do; nothing where none would, or where it gets too long."""
    if stages > _LONGEST_EXAMPLE or layers < stages:
        return ""
    return f", for example {list(even_cut(layers, stages))}"


def _refuse_too_few(layers: int, stages: int) -> None:
    if stages < 1:
        raise InvalidCall(f"a cut into {stages} stages: give at least 1.")
    if layers < stages:
        raise InvalidCall(
            f"{_count(layers, 'layer')} cannot be cut into {_count(stages, 'stage')}, for each needs at least one. "
            f"The most stages possible is {layers}: use fewer pipeline ranks or virtual stages, or more layers."
        )


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def summed(costs: Sequence[float]) -> StageCosts:
    """A stage costs what its layers cost together."""
    for layer, cost in enumerate(costs):
        if not isfinite(cost) or cost < 0:
            raise InvalidCall(f"the cost of layer {layer} is {cost!r}: give a finite number that is not negative.")
    # Sums of their own and no differences of prefix sums: stages of the same costs get the very same sum, wherever
    # they begin, or ties would be broken by rounding.
    return [list(accumulate(costs[first:])) for first in range(len(costs))]


def counted_once(parts: Sequence[Mapping[Hashable, int]]) -> StageCosts:
    """A stage costs the sizes of its layers' parts, and a part that several of them share counts once."""
    return [list(_growing_union(parts[first:])) for first in range(len(parts))]


def _growing_union(parts: Sequence[Mapping[Hashable, int]]) -> Iterator[int]:
    seen: dict[Hashable, int] = {}
    total = 0
    for part in parts:
        total += sum(size for key, size in part.items() if key not in seen)
        seen |= part
        yield total


def best_cut(costs: StageCosts, stages: int, rank_of_stage: Sequence[int] | None = None) -> Cut:
    """The cut whose dearest stage is as cheap as it can be. Of several the one with the most even numbers of layers
    (the least sum of squares), of these the one whose first stages have more.

    With `rank_of_stage` it is the dearest rank that counts, by the sum over its stages. That cut is looked for step by
    step from the other one: never worse than it, but not proved to be the best. (Where all cuts could be tried, of 4 to
    14 layers with random costs, it was 1 % above the best on average, and the other one 7 %.)
    """
    _refuse_too_few(len(costs), stages)
    cut = _most_even(costs, stages, _lowest_peak(costs, stages))
    return cut if rank_of_stage is None else _for_ranks(cut, costs, rank_of_stage)


def _lowest_peak(costs: StageCosts, stages: int) -> float:
    """The cost of the dearest stage in a best cut."""
    peaks: list[float] = [row[-1] for row in costs]  # of all layers from `first` on, in one stage, then in two ...
    for _ in range(stages - 1):
        peaks = [_peak(row, peaks[first + 1 :]) for first, row in enumerate(costs)]
    return peaks[0]


def _peak(row: Sequence[float], peaks_after: Sequence[float]) -> float:
    best = inf
    for cost, after in zip(row, peaks_after, strict=False):  # the last has no layer after it
        if cost >= best:
            break  # longer stages are dearer still
        best = min(best, max(cost, after))
    return best


def _most_even(costs: StageCosts, stages: int, limit: float) -> Cut:
    """Of the cuts without a stage above `limit` the one with the least sum of squares, the first stages longest."""
    lengths = [sum(1 for _ in takewhile(lambda cost: cost <= limit, row)) for row in costs]
    layers = len(costs)
    # For all layers from `first` on: least sum of squares, and the length of the first stage that gives it.
    found = [((layers - first) ** 2 if lengths[first] == layers - first else inf, 0) for first in range(layers)]
    choices: list[list[int]] = []
    for _ in range(stages - 1):
        found = [_least_squares(length, found[first + 1 :]) for first, length in enumerate(lengths)]
        choices.append([length for _, length in found])
    cut, first = [], 0
    for choice in reversed(choices):
        cut.append(choice[first])
        first += choice[first]
    return (*cut, layers - first)


def _least_squares(longest: int, after: Sequence[tuple[float, int]]) -> tuple[float, int]:
    best, best_length = inf, 0
    for length, (squares, _) in enumerate(after[:longest], 1):
        if length**2 + squares <= best:
            best, best_length = length**2 + squares, length
    return best, best_length


def _for_ranks(cut: Cut, costs: StageCosts, rank_of_stage: Sequence[int]) -> Cut:
    """Moves one layer from a stage to another, those between shift along, for as long as that helps."""
    if len(rank_of_stage) != len(cut):
        raise InvalidCall(
            f"rank_of_stage has {_count(len(rank_of_stage), 'rank')} for {_count(len(cut), 'stage')}: give one a stage."
        )

    def badness(cut: Cut) -> tuple[list[float], int]:
        loads = dict.fromkeys(rank_of_stage, 0.0)
        for rank, (first, end) in zip(rank_of_stage, bounds(cut), strict=True):
            loads[rank] += costs[first][end - first - 1]
        # All loads and not only the highest: else a search stops where two ranks are equally slow.
        return sorted(loads.values(), reverse=True), sum(number**2 for number in cut)

    while (better := min(_neighbours(cut), key=badness, default=cut)) and badness(better) < badness(cut):
        cut = better
    return cut


def _neighbours(cut: Cut) -> Iterator[Cut]:
    for giver, taker in permutations(range(len(cut)), 2):
        if cut[giver] > 1:
            yield tuple(number - (stage == giver) + (stage == taker) for stage, number in enumerate(cut))


def bounds(cut: Cut) -> tuple[tuple[int, int], ...]:
    """Of each stage its first layer, and the layer after its last."""
    ends = tuple(accumulate(cut))
    return tuple(zip((0, *ends), ends, strict=False))
