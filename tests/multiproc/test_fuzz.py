"""Random calls of all kinds, several under way at once, compared with what one process computes from the same seeds.

PARALLEL3D_FUZZ_SEED repeats a run, and with others finds more.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import pytest
import torch

import parallel3d
from tests.support.ranks import Ranks, Tell, torch_variables

pytestmark = pytest.mark.slow

SEED = int(os.environ.get("PARALLEL3D_FUZZ_SEED", "20240611"))
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64)
HALVES = (torch.bfloat16, torch.float16)
OPS = ("sum", "mean", "min", "max")
STRATEGIES = ("default", "ring", "tree", "hierarchical", "adaptive")
COLLECTIVES = ("all_reduce", "all_reduce", "all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all")
MOST_AT_ONCE = 6


@dataclass(frozen=True)
class Case:
    """One call as all ranks make it; for `exchange`, a send from each rank to the one `shift` further."""

    number: int
    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    op: str
    strategy: str
    root: int
    shift: int
    registered: tuple[bool, ...]
    """For each rank."""

    strided: tuple[bool, ...]


def cases(seed: int, size: int, num: int, largest: int) -> list[Case]:
    choose = random.Random(f"{seed} {size}")
    found = []
    for number in range(num):
        kind = choose.choice((*COLLECTIVES, "exchange", "barrier"))
        dtype = choose.choice(DTYPES)
        found.append(
            Case(
                number,
                kind,
                _shape(choose, kind, size, dtype, largest),
                dtype,
                choose.choice(OPS if dtype.is_floating_point else ("sum", "min", "max")),
                choose.choice(STRATEGIES) if kind == "all_reduce" else "default",
                choose.randrange(size),
                choose.randrange(1, size),
                tuple(choose.random() < choose.choice((0.0, 0.5, 1.0)) for _ in range(size)),
                tuple(choose.random() < 0.15 for _ in range(size)),
            )
        )
    return found


def _shape(choose: random.Random, kind: str, size: int, dtype: torch.dtype, largest: int) -> tuple[int, ...]:
    scale = choose.choice((0, 1, 7, 64, 1000, 10_000, 17_000, 70_000, 300_000, largest))
    most = max(1, scale // dtype.itemsize)
    rows = choose.choice((1, 2, 3)) * (size if kind in ("reduce_scatter", "all_to_all") else 1)
    if scale == 0:
        return choose.choice(((0,), (0, 3), (size, 0)))
    if scale == 1:
        return (rows,) if rows > 1 else choose.choice(((), (1,), (1, 1))) if kind not in _CUT else (size,)
    return (rows, max(1, choose.randint(most // 2, most) // rows))


_CUT = ("reduce_scatter", "all_to_all")


def source_of(case: Case, rank: int) -> torch.Tensor:
    """The same in every process."""
    generator = torch.Generator().manual_seed(case.number * 1000 + rank)
    if case.dtype.is_floating_point:
        return torch.randn(case.shape, generator=generator).mul_(8).to(case.dtype)
    return torch.randint(-1000, 1000, case.shape, generator=generator).to(case.dtype)


def reduced(case: Case, sources: list[torch.Tensor]) -> torch.Tensor:
    """One after the other, in rank order; 16-bit sums in float32."""
    wide = torch.float32 if case.dtype in HALVES and case.op in ("sum", "mean") else case.dtype
    combine: Callable[..., torch.Tensor] = {"min": torch.minimum, "max": torch.maximum}.get(case.op, torch.add)
    total = sources[0].to(wide)
    for source in sources[1:]:
        total = combine(total, source.to(wide))
    return (total / len(sources) if case.op == "mean" else total).to(case.dtype)


def expected(case: Case, rank: int, size: int) -> torch.Tensor:
    sources = [source_of(case, peer) for peer in range(size)]
    match case.kind:
        case "all_reduce":
            return reduced(case, sources)
        case "reduce_scatter":
            return reduced(case, sources).tensor_split(size)[rank]
        case "all_gather":
            return torch.cat([source.reshape(1) if source.dim() == 0 else source for source in sources])
        case "broadcast":
            return sources[case.root]
        case "all_to_all":
            return torch.cat([source.tensor_split(size)[rank] for source in sources])
        case "exchange":
            return sources[(rank - case.shift) % size]
    return torch.zeros(0)


def check(case: Case, found: torch.Tensor, right: torch.Tensor, exact: bool) -> None:
    assert (found.shape, found.dtype) == (right.shape, right.dtype)
    moved = case.kind not in ("all_reduce", "reduce_scatter")
    if moved or not case.dtype.is_floating_point or case.op in ("min", "max") or (exact and case.strategy == "default"):
        assert torch.equal(found, right), f"{(found != right).sum()} of {right.numel()} elements differ"
    else:  # another order of additions
        steps = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 1e-6, torch.float64: 1e-14}[case.dtype]
        assert torch.allclose(found.double(), right.double(), rtol=2 * steps, atol=100 * steps)


def make_tensor(group: parallel3d.Group, case: Case, values: torch.Tensor) -> torch.Tensor:
    shape = values.shape
    if case.strided[group.rank] and values.dim() == 2:
        shape = torch.Size((shape[1], 2 * shape[0]))
    registered = case.registered[group.rank]
    tensor = group.empty(shape, dtype=case.dtype) if registered else torch.empty(shape, dtype=case.dtype)
    if shape != values.shape:
        tensor = tensor.t()[::2]
    return tensor.copy_(values)


def begin(group: parallel3d.Group, case: Case) -> tuple[torch.Tensor | None, list[Awaitable[object]]]:
    """Start a call; what its result will be in, and what to await."""
    mine = make_tensor(group, case, source_of(case, group.rank))
    match case.kind:
        case "all_reduce":
            return mine, [group.all_reduce(mine, case.op, case.strategy)]
        case "broadcast":
            return mine, [group.broadcast(mine, case.root)]
        case "barrier":
            return None, [group.barrier()]
        case "exchange":
            target = make_tensor(group, case, torch.zeros(case.shape, dtype=case.dtype))
            peers = (group.rank + case.shift) % group.size, (group.rank - case.shift) % group.size
            return target, [group.send(mine, peers[0]), group.recv(target, peers[1])]
    options = {"op": case.op} if case.kind == "reduce_scatter" else {}
    out = None
    if case.number % 3:
        out = make_tensor(group, case, torch.zeros_like(expected(case, group.rank, group.size)))
        options["out"] = out
    work = getattr(group, case.kind)(mine, **options)
    return out, [work]


async def finish(begun: tuple[torch.Tensor | None, list[Awaitable[object]]], choose: random.Random) -> torch.Tensor:
    target, works = begun
    results = [await work for work in choose.sample(works, len(works))]
    return results[0] if target is None else target  # type: ignore[return-value]


async def fuzz(tell: Tell, backend: str, seed: int, num: int, largest: int) -> None:
    async with parallel3d.mesh(dp=int(os.environ["WORLD_SIZE"]), backend=backend) as mesh:
        group, todo = mesh.world, cases(seed, mesh.world_size, num, largest)
        tell(group.transport_name)
        exact = group.transport_name == "shared-memory"
        pace, own_pace = random.Random(f"pace {seed}"), random.Random(f"{seed} of {mesh.rank}")
        while todo:
            at_once, todo = todo[: (n := pace.randint(1, MOST_AT_ONCE))], todo[n:]
            begun = [(case, begin(group, case)) for case in at_once]
            digests = []
            for case, call in own_pace.sample(begun, len(begun)):
                try:
                    found = await finish(call, own_pace)
                    if case.kind != "barrier":
                        check(case, found, expected(case, mesh.rank, mesh.world_size), exact)
                    if case.kind == "all_reduce":
                        digests.append((case.number, digest(found)))
                except Exception as error:
                    raise AssertionError(f"{case}: {type(error).__name__}: {error}") from error
            mine = torch.tensor([number for _, number in sorted(digests)], dtype=torch.int64)
            everyone = await group.all_gather(mine)
            assert all(torch.equal(theirs, mine) for theirs in everyone.chunk(mesh.world_size) if mine.numel()), at_once
            await asyncio.sleep(0)
        tell("done")


def digest(tensor: torch.Tensor) -> int:
    values = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor).view(-1).view(torch.uint8)
    return int.from_bytes(hashlib.blake2b(values.numpy().tobytes(), digest_size=7).digest(), "little")


def run(backend: str, size: int, num: int, largest: int, transport: str, ranks_per_host: int = 0) -> None:
    variables = torch_variables(size)
    if ranks_per_host:
        variables = [{**each, "PARALLEL3D_HOST": f"host-{n // ranks_per_host}"} for n, each in enumerate(variables)]
    with Ranks(fuzz, variables, (backend, SEED, num, largest)) as ranks:
        try:
            assert [rank.hear() for rank in ranks] == [transport] * size
            assert [rank.hear(100.0) for rank in ranks] == ["done"] * size
            assert [rank.finish() for rank in ranks] == [0] * size
        except BaseException as error:
            error.add_note(f"PARALLEL3D_FUZZ_SEED={SEED}")
            raise


@pytest.mark.parametrize(
    ("size", "num"),
    [(2, 300), pytest.param(3, 250, marks=pytest.mark.exhaustive), pytest.param(5, 150, marks=pytest.mark.exhaustive)],
)
def test_random_calls_in_shared_memory(size, num):
    run("auto", size, num, 3 << 20, "shared-memory")


def test_large_random_calls_in_shared_memory():
    run("auto", 3, 25, 20 << 20, "shared-memory")


def test_random_calls_over_gloo():
    run("gloo", 3, 60, 1 << 20, "gloo")


def test_random_calls_in_shared_memory_inside_hosts_and_over_gloo_between_them():
    run("auto", 4, 60, 1 << 20, "gloo", ranks_per_host=2)
