"""Workers of a gradient server, all in this process: what they train together is what one process trains."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from monitoring.messages import RunStep
from parallel3d.config import RunConfig, load_config
from parallel3d.gradient_worker.joined_training import JoinedTraining
from parallel3d.gradient_worker.worker import GradientWorker
from parallel3d.training.coordinator import Coordinator
from runtime.errors import ConfigError, NonFiniteGradient
from runtime.gradient_server.client.protocol import ServerRefused
from runtime.gradient_server.server import GradientServer, StepRecord
from runtime.gradient_server.settings import GradientServerSettings

STEPS, SAMPLES = 4, 7
Weights = dict[str, torch.Tensor]


class Samples:
    """Some count less than others."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        numbers = torch.Generator().manual_seed(index)
        inputs, targets = torch.randint(0, 17, (2, 6), generator=numbers)
        return inputs, targets.masked_fill(torch.rand(6, generator=numbers) < index % 7 / 10, -100)


class Points:
    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.full((3,), index / 100, dtype=torch.float64)
        return x, x.sin().sum(0, keepdim=True)


def linear() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))


def loss_and_count(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Only targets that are even count."""
    counts = (target >= 0) & (target % 2 == 0)
    total = torch.nn.functional.cross_entropy(output[counts], target[counts], reduction="sum")
    return total, int(counts.sum())


def light(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, float]:
    """All of a batch counts less than one."""
    return (output - target).square().sum() * 0.01, len(target) * 0.01


def infinite(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output.sum() * torch.inf


GPT = {
    "model.args": {"layers": 2, "width": 8, "heads": 2, "vocabulary": 17, "sequence": 6},
    "data.factory": f"{__name__}:Samples",
}
LINEAR = {
    "model": {"factory": f"{__name__}:linear", "loss": "mse"},
    "data.factory": f"{__name__}:Points",
}


def config(basis: dict[str, Any], **more: Any) -> RunConfig:
    given = {
        "train": {"steps": STEPS, "batch_size": SAMPLES, "precision": "float64"},
        "optimizer": {"lr": 0.05, "clip_norm": 1.0},
        "runtime.threads": 1,
        "monitoring.enabled": False,
        **basis,
        **more,
    }
    return load_config(None, overrides=given, environ={})


async def alone(given: RunConfig) -> tuple[list[float], Weights]:
    async with Coordinator.from_config(given) as coordinator:
        losses = [(await coordinator.train_step(batch)).loss async for batch in coordinator.batches()]
        return losses, await coordinator.whole_weights()


async def worker(address: str, given: RunConfig) -> tuple[list[RunStep], Weights]:
    async with JoinedTraining(given, GradientWorker(address)) as training:
        return [step async for step in training.steps()], training.weights()


async def together(given: RunConfig, num_workers: int, **settings: Any) -> tuple[list[Any], list[StepRecord]]:
    """What each worker has at the end, and what the server saw."""
    records: list[StepRecord] = []
    wanted = {"workers": num_workers, "samples": given.batch_size, "steps": given.train.steps, "port": 0, **settings}
    async with asyncio.timeout(60), GradientServer(GradientServerSettings(**wanted), records.append) as server:
        async with asyncio.TaskGroup() as tasks:
            tasks_of_workers = [tasks.create_task(worker(server.address, given)) for _ in range(num_workers)]
        await server.finished()
    return [task.result() for task in tasks_of_workers], records


@pytest.mark.parametrize(
    ("basis", "num_workers", "more"),
    [
        (GPT, 1, {}),
        (GPT, 2, {}),
        (GPT, 3, {"pipeline.microbatches": 7}),
        (GPT, 2, {"model": {"args": GPT["model.args"], "loss": f"{__name__}:loss_and_count"}, "model.args": None}),
        (GPT, 2, {"optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9, "schedule": "cosine", "warmup_steps": 2}}),
        (LINEAR, 3, {}),
        (LINEAR, 2, {"model": {"factory": f"{__name__}:linear", "loss": f"{__name__}:light"}}),
        (LINEAR, 7, {"pipeline.virtual_stages": 2, "pipeline.schedule": "interleaved", "pipeline.microbatches": 7}),
    ],
    ids=["one", "two", "microbatches", "own loss", "sgd", "mse", "fractions", "stages"],
)
async def test_they_train_what_one_process_trains(basis, num_workers, more):
    given = config({key: value for key, value in {**basis, **more}.items() if value is not None})
    losses, weights = await alone(given)
    found, records = await together(given, num_workers)
    for steps, theirs in found:
        assert [step.loss for step in steps] == pytest.approx(losses, abs=1e-9)
        assert list(theirs) == list(weights)
        for name, values in weights.items():
            torch.testing.assert_close(theirs[name], values, rtol=0, atol=1e-9)
    assert [(record.step, record.attempt, record.total) for record in records] == [
        (step, 0, SAMPLES) for step in range(STEPS)
    ]


@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-6), ("bfloat16", 1e-2)])
async def test_other_precisions(precision, tolerance):
    train = {"steps": STEPS, "batch_size": SAMPLES, "precision": precision}
    given = config(GPT, train=train, optimizer={"name": "sgd", "lr": 0.1})
    losses, expected = await alone(given)
    ((mine, weights), (_, others)), _ = await together(given, 2)
    assert [step.loss for step in mine] == pytest.approx(losses, abs=tolerance)
    for name, values in expected.items():
        torch.testing.assert_close(weights[name], values, rtol=0, atol=tolerance)
        assert torch.equal(weights[name], others[name])


async def test_a_worker_with_fewer_steps_leaves_and_the_others_go_on():
    long, short = config(GPT), config(GPT, **{"train.steps": 2})
    losses, weights = await alone(long)
    settings = GradientServerSettings(workers=2, samples=SAMPLES, port=0)
    async with asyncio.timeout(60), GradientServer(settings) as server:
        (mine, theirs), (few, _) = await asyncio.gather(worker(server.address, long), worker(server.address, short))
        summary = await server.finished()
    assert (summary.steps, summary.reason, len(few)) == (STEPS, "all workers have left", 2)
    assert [step.loss for step in mine] == pytest.approx(losses, abs=1e-9)
    for name, values in weights.items():
        torch.testing.assert_close(theirs[name], values, rtol=0, atol=1e-9)


async def test_a_batch_of_another_size():
    with pytest.raises(ExceptionGroup) as failure:
        await together(config(GPT), 1, samples=8)
    assert failure.group_contains(ConfigError, match=r"train.batch_size = 7: the server's steps have 8 samples")


@pytest.mark.parametrize("axis", ["dp", "tp", "pp"])
def test_a_worker_is_one_process(axis):
    given = config(GPT, **{f"parallel.{axis}": 2, "train": {"batch_size": 8}})
    with pytest.raises(ConfigError, match=f"parallel.{axis} = 2"):
        JoinedTraining(given, GradientWorker("127.0.0.1:1"))


async def test_gradients_that_are_not_finite_are_refused_by_name():
    given = config(LINEAR, model={"factory": f"{__name__}:linear", "loss": f"{__name__}:infinite"})
    with pytest.raises(ExceptionGroup) as failure:
        await together(given, 2)
    assert failure.group_contains(ServerRefused, match="not_finite")
    assert not failure.group_contains(NonFiniteGradient)
