"""A model cut into stages: the best cuts, what is refused, what profiling measures and leaves as it was."""

from __future__ import annotations

import copy
import itertools
import random
from collections import OrderedDict
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from parallel3d.models.layer_profile import LayerCost, profile_layers
from parallel3d.models.partition import Partition, partition
from parallel3d.pipeline.schedules.layer_split import best_cut, bounds, counted_once, even_cut, given_cut, summed
from parallel3d.pipeline.stage import Stage
from runtime.errors import InvalidCall

SIZES = [(layers, stages) for layers in range(1, 10) for stages in range(1, min(layers, 5) + 1)]


def all_cuts(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    for inner in itertools.combinations(range(1, layers), stages - 1):
        yield tuple(end - first for first, end in itertools.pairwise((0, *inner, layers)))


def stage_costs(cut, costs):
    return [costs[first][end - first - 1] for first, end in bounds(cut)]


def rank_loads(cut, costs, rank_of_stage):
    loads = dict.fromkeys(rank_of_stage, 0.0)
    for rank, cost in zip(rank_of_stage, stage_costs(cut, costs), strict=True):
        loads[rank] += cost
    return loads


def by_brute_force(costs, stages):
    """The dearest stage, then evenness, then longer stages first."""

    def rank(cut):
        return max(stage_costs(cut, costs)), sum(number**2 for number in cut), [-number for number in cut]

    return min(all_cuts(len(costs), stages), key=rank)


# Cuts, which are pure.


@pytest.mark.parametrize(("layers", "stages"), SIZES)
def test_the_best_cut_is_the_one_that_brute_force_finds(layers, stages):
    draw = random.Random(layers * 10 + stages)
    for kind in range(60):
        # Whole numbers of a small range make many ties, zeros among them; floats make rounding.
        costs = [
            draw.choice((draw.randint(0, 3), draw.random())) if kind % 2 else draw.randint(0, 4) for _ in range(layers)
        ]
        table = summed(costs)
        assert best_cut(table, stages) == by_brute_force(table, stages), costs


@pytest.mark.parametrize(("layers", "stages"), SIZES)
def test_what_layers_share_counts_once_in_a_stage(layers, stages):
    draw = random.Random(layers * 10 + stages)
    sizes = {part: draw.randint(1, 9) for part in "abcdefg"}
    for _ in range(30):
        parts = [{part: sizes[part] for part in draw.sample("abcdefg", draw.randint(0, 3))} for _ in range(layers)]
        table = counted_once(parts)
        for first, end in itertools.combinations(range(layers + 1), 2):
            assert table[first][end - first - 1] == sum(sizes[part] for part in set().union(*parts[first:end]))
        assert best_cut(table, stages) == by_brute_force(table, stages)


@pytest.mark.parametrize(("layers", "stages"), SIZES)
def test_an_even_cut_is_array_splits_and_the_best_of_equal_layers(layers, stages):
    numpy = pytest.importorskip("numpy")
    cut = even_cut(layers, stages)
    assert list(cut) == [len(part) for part in numpy.array_split(range(layers), stages)]
    assert best_cut(summed([0.1] * layers), stages) == best_cut(summed([0.0] * layers), stages) == cut


def test_a_large_cut_does_not_take_long():
    costs = [random.Random(layer).random() for layer in range(400)]
    cut = best_cut(summed(costs), 64)
    assert (len(cut), sum(cut), min(cut) > 0) == (64, 400, True)


RANKS = [(0, 1, 2, 2, 1, 0), (0, 1, 2, 0, 1, 2), (0, 1, 0, 1)]


@pytest.mark.parametrize("rank_of_stage", RANKS)
def test_the_slowest_rank_is_never_slower_than_with_the_best_stages(rank_of_stage):
    stages = len(rank_of_stage)
    above = []
    for seed in range(20):
        draw = random.Random(seed)
        table = summed([draw.random() + 0.1 for _ in range(11)])
        found, plain = best_cut(table, stages, rank_of_stage), best_cut(table, stages)
        slowest, before = (max(rank_loads(cut, table, rank_of_stage).values()) for cut in (found, plain))
        best = min(max(rank_loads(cut, table, rank_of_stage).values()) for cut in all_cuts(11, stages))
        assert (sum(found), min(found) > 0, slowest <= before) == (11, True, True)
        above.append(slowest / best)
    assert sum(above) / len(above) < 1.05


def test_in_a_v_the_rank_with_a_slow_head_gets_fewer_layers_at_the_front():
    table, v = summed([1] * 10 + [6]), (0, 1, 1, 0)
    assert (best_cut(table, 4), rank_loads((4, 3, 3, 1), table, v)) == ((4, 3, 3, 1), {0: 10, 1: 6})
    assert (best_cut(table, 4, v), rank_loads((2, 4, 4, 1), table, v)) == ((2, 4, 4, 1), {0: 8, 1: 8})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: even_cut(5, 6),
            "5 layers cannot be cut into 6 stages, for each needs at least one. The most stages possible is 5: "
            "use fewer pipeline ranks or virtual stages, or more layers.",
        ),
        (
            lambda: best_cut(summed([1.0]), 2),
            "1 layer cannot be cut into 2 stages, for each needs at least one. The most stages possible is 1: "
            "use fewer pipeline ranks or virtual stages, or more layers.",
        ),
        (lambda: even_cut(5, 0), "a cut into 0 stages: give at least 1."),
        (
            lambda: given_cut([3, 5, 2], 8, 2),
            "layers_per_stage = [3, 5, 2]: layers of 3 stages, but there are 2. "
            "Give 2 numbers that add up to 8, for example [4, 4].",
        ),
        (
            lambda: given_cut((3, 4), 8, 2),
            "layers_per_stage = [3, 4]: adds up to 7 layers, but the model has 8. "
            "Give 2 numbers that add up to 8, for example [4, 4].",
        ),
        (
            lambda: given_cut([8, 0], 8, 2),
            "layers_per_stage = [8, 0]: stage 1 gets 0 layers, but each needs a whole number, 1 or more. "
            "Give 2 numbers that add up to 8, for example [4, 4].",
        ),
        (
            lambda: given_cut([4.0, 4], 8, 2),
            "layers_per_stage = [4.0, 4]: stage 0 gets 4.0 layers, but each needs a whole number, 1 or more. "
            "Give 2 numbers that add up to 8, for example [4, 4].",
        ),
        (
            lambda: given_cut([1] * 16, 17, 17),
            f"layers_per_stage = {[1] * 16}: layers of 16 stages, but there are 17. Give 17 numbers that add up to 17.",
        ),
        (
            lambda: summed([1.0, -2.0]),
            "the cost of layer 1 is -2.0: give a finite number that is not negative.",
        ),
        (lambda: summed([float("nan")]), "the cost of layer 0 is nan: give a finite number that is not negative."),
        (
            lambda: best_cut(summed([1.0, 1.0]), 2, [0]),
            "rank_of_stage has 1 rank for 2 stages: give one a stage.",
        ),
    ],
)
def test_what_cannot_be_a_cut_is_refused(call, message):
    with pytest.raises(InvalidCall) as error:
        call()
    assert str(error.value) == message


# Models.


class Block(nn.Module):
    """Takes two tensors and gives two: values, and a mask that needs no gradient."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, values: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return values + torch.relu(self.linear(values)) * mask.unsqueeze(-1), mask


class Embedding(nn.Module):
    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(words, width)

    def forward(self, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.table(words), words > 0


class Head(nn.Module):
    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, words, bias=False)

    def forward(self, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.linear(values) * mask.unsqueeze(-1)


class Language(nn.Module):
    def __init__(self, *, blocks: int = 5, words: int = 11, width: int = 4, tied: bool = False) -> None:
        super().__init__()
        self.embedding, self.head = Embedding(words, width), Head(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        if tied:
            self.head.linear.weight = self.embedding.table.weight

    def pipeline_layers(self) -> list[nn.Module]:
        return [self.embedding, *self.blocks, self.head]

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        values, mask = self.embedding(words)
        for block in self.blocks:
            values, mask = block(values, mask)
        return self.head(values, mask)


def sample() -> torch.Tensor:
    return torch.arange(12).reshape(2, 6) % 11


def perceptron(*widths: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(here, after) for here, after in itertools.pairwise(widths)))


@pytest.mark.parametrize("way", [None, "even", "parameters", "profile", [1, 4, 2]])
def test_every_layer_is_in_exactly_one_stage(way):
    model = Language()
    cut = partition(model, 3, way, sample=sample())
    layers = [layer for stage in range(cut.num_stages) for layer in cut.layers_of(stage)]
    assert [id(layer) for layer in layers] == [id(layer) for layer in model.pipeline_layers()]
    assert all(cut.layers_of(stage) for stage in range(3))
    assert cut.names == ("embedding", *(f"blocks.{index}" for index in range(5)), "head")
    assert (cut.bounds[0][0], cut.bounds[-1][1]) == (0, 7)


@pytest.mark.parametrize("stages", range(1, 8))
@pytest.mark.parametrize("tied", [False, True])
def test_the_stages_one_after_the_other_are_the_model_bit_for_bit(stages, tied):
    torch.manual_seed(stages)
    model = Language(tied=tied)
    cut = partition(model, stages)
    expected = model(sample())
    expected.sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    values = (sample(),)
    for stage in range(stages):
        output = cut.module_of(stage)(*values)
        values = output if isinstance(output, tuple) else (output,)
    assert torch.equal(values[0], expected)
    values[0].sum().backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, gradients[name])


def test_tuples_go_through_stages_of_a_pipeline():
    torch.manual_seed(0)
    model = Language()
    cut = partition(model, 3)
    stages = [Stage(index, 3, cut.module_of(index)) for index in range(3)]
    values = [sample()]
    for stage in stages:
        stage.forward(0, values)
        values = stage.outputs(0)
    assert torch.equal(values[0], model(sample()))
    gradients = [torch.ones_like(values[0])]
    for stage in reversed(stages):
        stage.backward(0, gradients)
        gradients = stage.input_gradients(0)
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    model(sample()).sum().backward()
    assert all(torch.equal(found[name], parameter.grad) for name, parameter in model.named_parameters())


def test_a_stages_parameters_are_called_as_in_the_sequential():
    model = perceptron(3, 3, 3, 3)
    cut = partition(model, 2)
    names = [name for stage in range(2) for name in cut.module_of(stage).state_dict()]
    assert names == list(model.state_dict())


def test_a_layer_that_stands_in_two_places_is_called_twice():
    torch.manual_seed(0)
    twice = nn.Linear(2, 2)
    model = nn.Sequential(OrderedDict(a=twice, b=nn.Tanh(), c=twice))
    cut, values = partition(model, 1), torch.ones(1, 2)
    assert cut.names == ("a", "b", "c")
    assert torch.equal(cut.module_of(0)(values), model(values))
    assert cut.parameters_of(0) == 6


def test_the_largest_stage_has_as_few_parameters_as_it_can():
    model = perceptron(8, 8, 8, 8, 64, 1)
    cut = partition(model, 3, "parameters")
    assert (cut.layers_per_stage, [cut.parameters_of(stage) for stage in range(3)]) == ((3, 1, 1), [216, 576, 65])


def test_tied_parameters_count_once_in_a_stage_but_in_each_stage():
    tied, free = (
        partition(Language(blocks=1, words=10, width=2, tied=tied), 1, "parameters") for tied in (True, False)
    )
    assert (tied.parameters_of(0), free.parameters_of(0)) == (20 + 6, 20 + 6 + 20)
    apart = partition(Language(blocks=1, words=10, width=2, tied=True), 3)
    assert [apart.parameters_of(stage) for stage in range(3)] == [20, 6, 20]


def test_tied_layers_make_room_in_their_stage():
    widths = [(10, 10), (10, 10), (10, 8), (8, 20)]
    tied, free = (nn.Sequential(*(nn.Linear(*each, bias=False) for each in widths)) for _ in range(2))
    tied[1].weight = tied[0].weight
    cuts = [partition(model, 2, "parameters") for model in (free, tied)]
    assert [cut.layers_per_stage for cut in cuts] == [(2, 2), (3, 1)]
    assert [[cut.parameters_of(stage) for stage in range(2)] for cut in cuts] == [[200, 240], [180, 160]]


def test_printed_it_is_a_table():
    model = Language(blocks=2, words=1000, width=4, tied=True)
    costs = [LayerCost(0.25, 0.0, 0.5), LayerCost(1, 1, 1), LayerCost(1, 1, 1), LayerCost(0.5, 0.5, 1)]
    assert str(partition(model, 2, [1, 3], costs=costs)) == (
        "stage  layers  parameters  seconds  from       to\n"
        "    0       1       4,000     0.75  embedding  embedding\n"
        "    1       3       4,040        8  blocks.0   head\n"
        "  all       4       4,040     8.75"
    )
    assert str(partition(perceptron(2, 2, 2), 2)) == (
        "stage  layers  parameters  seconds  from  to\n"
        "    0       1           6        -  0     0\n"
        "    1       1           6        -  1     1\n"
        "  all       2          12        -"
    )


def test_costs_measured_before_are_used():
    costs = [LayerCost(cost, 0.0, 0.0) for cost in (5.0, 1.0, 1.0, 1.0)]
    cut = partition(perceptron(2, 2, 2, 2, 2), 2, "profile", costs=costs)
    assert (cut.layers_per_stage, cut.seconds_of(0), cut.seconds_of(1)) == ((1, 3), 5.0, 3.0)
    over_ranks = partition(perceptron(2, 2, 2, 2, 2), 4, "profile", costs=costs, rank_of_stage=(0, 1, 1, 0))
    assert over_ranks.layers_per_stage == (1, 1, 1, 1)


class OwnForward(nn.Sequential):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values


class Loses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(2))
        self.scale = nn.Parameter(torch.zeros(2))
        self.linear = nn.Linear(2, 2)

    def pipeline_layers(self) -> list[nn.Module]:
        return [self.linear]


class GivesFunctions(nn.Module):
    def pipeline_layers(self) -> list[object]:
        return [nn.Linear(2, 2), torch.relu]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: partition(nn.Linear(2, 2), 1),
            "Linear cannot be cut into stages: it is no nn.Sequential. "
            "Give it a method pipeline_layers() that returns its layers in order.",
        ),
        (
            lambda: partition(OwnForward(nn.Linear(2, 2)), 1),
            "OwnForward cannot be cut into stages: it has a forward of its own. "
            "Give it a method pipeline_layers() that returns its layers in order.",
        ),
        (
            lambda: partition(Loses(), 1),
            "Loses: no layer has the parameter positions (and 1 more). "
            "Put it into one of the modules that pipeline_layers() returns.",
        ),
        (
            lambda: partition(GivesFunctions(), 1),
            "GivesFunctions: layer 1 is builtin_function_or_method; each layer must be an nn.Module.",
        ),
        (
            lambda: partition(perceptron(2, 2), 1, "time"),
            'layers_per_stage = "time": must be even, parameters, profile or a list of numbers, one a stage.',
        ),
        (
            lambda: partition(perceptron(2, 2), 1, "profile"),
            'layers_per_stage = "profile" measures layers: give a sample, or costs measured before.',
        ),
        (
            lambda: partition(perceptron(2, 2), 2, "profile"),
            "1 layer cannot be cut into 2 stages, for each needs at least one. The most stages possible is 1: "
            "use fewer pipeline ranks or virtual stages, or more layers.",
        ),
        (
            lambda: partition(perceptron(2, 2), 1, costs=[]),
            "costs of 0 layers, but the model has 1: give one a layer.",
        ),
        (lambda: partition(perceptron(2, 2, 2), 2).layers_of(2), "stage 2: there are 2 stages, 0 to 1."),
        (lambda: partition(perceptron(2, 2, 2), 2).module_of(-1), "stage -1: there are 2 stages, 0 to 1."),
        (lambda: profile_layers([], torch.ones(1), repeats=0), "repeats = 0: give at least 1."),
        (
            lambda: profile_layers([], "text"),
            "the sample gives str; give a tensor or a tuple of tensors.",
        ),
    ],
)
def test_what_cannot_be_cut_or_measured_is_refused(call, message):
    with pytest.raises(InvalidCall) as error:
        call()
    assert str(error.value) == message


# Profiling.


class FakeClock:
    """Stands still but for what layers add."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class _Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, weight, layer):
        ctx.layer = layer
        layer.clock.now += layer.forward_seconds * layer.next_factor()
        return values * weight

    @staticmethod
    def backward(ctx, gradient):
        layer = ctx.layer
        for needed, seconds in zip(ctx.needs_input_grad, (layer.input_seconds, layer.weight_seconds), strict=False):
            layer.clock.now += seconds if needed else 0
        return gradient, gradient.sum(), None


class Slow(nn.Module):
    """Takes as long as told; in the first pass ten times as long, and in those after it 1, 9, 2, 1, 9, 2 ... times."""

    def __init__(self, clock: FakeClock, forward: float, inputs: float, weight: float) -> None:
        super().__init__()
        self.clock, self.forward_seconds, self.input_seconds, self.weight_seconds = clock, forward, inputs, weight
        self.weight = nn.Parameter(torch.ones(()))
        self.factors = itertools.chain([10], itertools.cycle([1, 9, 2]))
        self.factor = 1

    def next_factor(self) -> int:
        """A pass calls a layer a second time with its weight frozen."""
        if self.weight.requires_grad:
            self.factor = next(self.factors)
        return self.factor

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return _Slow.apply(values, self.weight, self)


def test_seconds_are_medians_after_a_warm_up():
    clock = FakeClock()
    layers = [Slow(clock, 1, 8, 4), Slow(clock, 2, 16, 32), Slow(clock, 4, 0, 0)]
    assert profile_layers(layers, torch.ones(2), repeats=3, clock=clock) == [
        LayerCost(2, 0, 4),  # the sample needs no gradient
        LayerCost(4, 16, 32),
        LayerCost(8, 0, 0),
    ]


def test_a_sample_that_needs_a_gradient_costs_the_first_layer_its_part():
    clock = FakeClock()
    costs = profile_layers([Slow(clock, 1, 8, 4)], torch.ones(2, requires_grad=True), repeats=3, clock=clock)
    assert costs == [LayerCost(2, 8, 4)]


def test_a_frozen_layer_has_no_weight_part():
    clock = FakeClock()
    frozen = Slow(clock, 1, 8, 4).requires_grad_(False)
    costs = profile_layers([frozen, Slow(clock, 1, 8, 4), frozen], torch.ones(2), repeats=3, clock=clock)
    assert [(cost.input_backward, cost.weight_backward) for cost in costs] == [(0, 0), (0, 4), (8, 0)]
    assert not frozen.weight.requires_grad


def test_the_slowest_stage_is_as_fast_as_it_can_be():
    clock = FakeClock()
    model = nn.Sequential(*(Slow(clock, seconds, 0, 0) for seconds in (9, 1, 1, 1, 4, 5)))
    costs = profile_layers(list(model), torch.ones(1), repeats=3, clock=clock)
    cut = partition(model, 3, "profile", costs=costs)
    assert (cut.layers_per_stage, [cut.seconds_of(stage) for stage in range(3)]) == ((1, 3, 2), [18, 6, 18])


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Small layers on several threads wait for each other wherever other processes are at work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
def test_real_layers_of_very_different_size():
    torch.manual_seed(0)
    model = perceptron(16, 16, 16, 16, 1024, 1024, 1024)
    cut = partition(model, 2, "profile", sample=torch.randn(128, 16))
    assert cut.costs is not None
    small, large = cut.costs[1].seconds, cut.costs[4].seconds
    assert large > 5 * small
    assert cut.layers_per_stage == (5, 1)


def changing_model() -> nn.Sequential:
    torch.manual_seed(0)
    limited = nn.Embedding(11, 4, max_norm=0.1)
    return nn.Sequential(limited, Transposed(), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Dropout(0.5), Cached())


class Transposed(nn.Module):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values.transpose(1, 2)


class Cached(nn.Module):
    """Replaces a buffer and adds one, and draws Python's random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.count = self.count + 1
        self.register_buffer("last", values.detach())
        return values * self.weight * random.random()


def test_profiling_leaves_everything_as_it_was():
    model = changing_model()
    gradient = torch.full((11, 4), 7.0)
    model[0].weight.grad = gradient
    model[2].bias.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    identities = {name: id(value) for name, value in model.state_dict(keep_vars=True).items()}
    states = torch.get_rng_state(), random.getstate()
    with torch.no_grad():
        profile_layers(list(model), sample())
    after = model.state_dict(keep_vars=True)
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert {name: id(value) for name, value in after.items()} == identities
    assert (torch.equal(torch.get_rng_state(), states[0]), random.getstate() == states[1]) == (True, True)
    assert model[0].weight.grad is gradient
    assert torch.equal(gradient, torch.full((11, 4), 7.0))
    assert [name for name, each in model.named_parameters() if each.grad is not None] == ["0.weight"]
    assert [name for name, each in model.named_parameters() if not each.requires_grad] == ["2.bias"]
    assert not hasattr(model[5], "last")


class Fails(nn.Module):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("out of order")


def test_a_layer_that_fails_is_named_and_all_is_as_it_was():
    model = nn.Sequential(nn.Linear(2, 2), Fails())
    model[0].weight.grad = gradient = torch.ones(2, 2)
    with pytest.raises(RuntimeError, match="out of order") as error:
        profile_layers(list(model), torch.ones(1, 2))
    assert error.value.__notes__ == ["This is from measuring layer 1 (Fails)."]
    assert model[0].weight.grad is gradient
    assert all(each.requires_grad for each in model.parameters())


class GivesText(nn.Module):
    def forward(self, values: torch.Tensor) -> str:
        return "text"


def test_a_layer_that_gives_no_tensor_is_refused():
    with pytest.raises(InvalidCall) as error:
        profile_layers([GivesText()], torch.ones(1))
    assert str(error.value) == "layer 0 (GivesText) gives str; give a tensor or a tuple of tensors."


def test_tuples_and_tensors_without_gradient_are_passed_on():
    costs = profile_layers(Language(blocks=2).pipeline_layers(), sample(), repeats=1)
    assert len(costs) == 4
    assert costs[0].input_backward == 0
    assert all(cost.seconds > 0 for cost in costs)


def test_a_partition_is_a_value():
    model = perceptron(2, 2, 2)
    assert partition(model, 2) == partition(model, 2, [1, 1]) == Partition(("0", "1"), tuple(model), (1, 1))


def test_a_layer_that_raises_is_named_with_what_it_was_given():
    cut = partition(perceptron(2, 2, 2), 1)
    with pytest.raises(RuntimeError) as caught:
        cut.module_of(0)(torch.zeros(4, 3))
    assert caught.value.__notes__ == ["Layer 0 of the model, Linear, was given float32 (4, 3)."]
