"""Training on a mesh beside a plain loop in one process: the same losses, the same weights."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional

from parallel3d.config import RunConfig, load_config
from parallel3d.models.build import build_model
from parallel3d.models.materialize import materialize
from parallel3d.tensor.sharded import cut_of
from parallel3d.training.coordinator import Coordinator

STEPS, SEQUENCE, VOCABULARY = 5, 8, 37
TWO_STAGES_A_RANK = ("interleaved", "round-robin", "zbv", "dualpipe-v")
SCHEDULES = ("1f1b", "zero-bubble", "interleaved", "gpipe", "zbv", "round-robin", "dualpipe-v")


def meshes(world_size: int) -> Iterator[tuple[int, int, int]]:
    """All dp, tp, pp with that product."""
    sizes = range(1, world_size + 1)
    return (mesh for mesh in itertools.product(sizes, repeat=3) if mesh[0] * mesh[1] * mesh[2] == world_size)


def settings(dp: int, tp: int, pp: int, schedule: str = "1f1b", **more: Any) -> dict[str, Any]:
    """A run whose sizes fit any mesh; a vocabulary that divides by none."""
    virtual = 2 if schedule in TWO_STAGES_A_RANK else 1
    microbatches = 2 * pp
    heads = tp if tp > 1 else 2
    found = {
        "model.args": {
            "layers": pp * virtual + 1,
            "width": 4 * heads,
            "heads": heads,
            "vocabulary": VOCABULARY,
            "sequence": SEQUENCE,
        },
        "parallel": {"dp": dp, "tp": tp, "pp": pp},
        "pipeline": {"schedule": schedule, "microbatches": microbatches, "virtual_stages": virtual},
        "optimizer": {"name": "adamw", "lr": 0.01, "clip_norm": 1.0},
        "train": {"steps": STEPS, "batch_size": 2 * dp * microbatches, "precision": "float64"},
        "comm.timeout": 60,
        "comm.bucket_size": "2 KiB",  # several buckets, also for a small model
        "runtime.threads": 1,
    }
    for key, value in more.items():
        path = key.replace("__", ".")
        section, _, name = path.rpartition(".")
        if section in found:
            found[section] = {**found[section], name: value}
        else:
            found[path] = value
    return found


FLOAT32 = {"train__precision": "float32", "optimizer__name": "sgd", "optimizer__lr": 0.1}


def of_a_llama(dp: int, tp: int, pp: int, schedule: str = "1f1b", **more: Any) -> dict[str, Any]:
    """The same for the other built-in model, with half as many heads for keys and values."""
    given = settings(dp, tp, pp, schedule, **more)
    kv_heads = max(2, tp)
    more_args = {"heads": 2 * kv_heads, "kv_heads": kv_heads, "width": 8 * kv_heads, "mlp_width": 6 * tp}
    return {**given, "model.factory": "llama", "model.args": given["model.args"] | more_args}


def of_a_users_model(dp: int, tp: int, pp: int, factory: str = "Tagger", **more: Any) -> dict[str, Any]:
    """The same for a model of the user's own, with a plan of its own."""
    args = {"vocabulary": VOCABULARY, "width": 6, "blocks": 3}
    model = {"factory": f"tests.support.user_models:{factory}", "args": args, "layers": "blocks.*"}
    return _of_model(model, settings(dp, tp, pp, **more))


def of_a_hugging_face_model(dp: int, tp: int, pp: int, **changes: Any) -> dict[str, Any]:
    """The same for a small Llama of `transformers`, or what `changes` make of it."""
    config = {
        "model_type": "llama",
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
    }
    model = {"factory": "hf", "args": {"config": config | changes, "sequence": SEQUENCE}}
    return _of_model(model, settings(dp, tp, pp, optimizer__name="sgd"))


HUGGING_FACE_TOLERANCE = 1e-6  # norms of `transformers` compute in float32, also in a model of float64


def _of_model(model: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    del given["model.args"]
    return {"model": model, **given}


def whole_batch(config: RunConfig, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Some targets are ignored, more of them in some samples than in others."""
    generator = torch.Generator().manual_seed(step)
    shape = (config.batch_size, SEQUENCE)
    inputs, targets = torch.randint(0, VOCABULARY, (2, *shape), generator=generator)
    limits = torch.linspace(0, 0.6, config.batch_size).unsqueeze(1)
    return inputs, targets.masked_fill(torch.rand(shape, generator=generator) < limits, -100)


def plain_loop(config: RunConfig) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of one process that knows nothing of meshes."""
    built = build_model(config)
    dtype = torch.float64 if config.train.precision == "float64" else torch.float32
    materialize(built, list(built.whole.named_modules()), config.train.seed, dtype, torch.device("cpu"))
    model, given = built.stage([len(built.layers)], 0), config.optimizer
    if given.name == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), given.lr, given.momentum)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), given.lr)
    losses = []
    for step in range(STEPS):
        inputs, targets = whole_batch(config, step)
        optimizer.zero_grad()
        logits = model(inputs)
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        if given.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), given.clip_norm)
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: each.detach() for name, each in built.whole.named_parameters()}


async def train(given: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor] | None]:
    """The same on this rank's mesh."""
    config = load_config(None, overrides=given)
    async with Coordinator.from_config(config) as coordinator:
        mesh, losses = coordinator.mesh, []
        for step in range(STEPS):
            batch = whole_batch(config, step)
            losses.append((await coordinator.train_step(tuple(_part(each, mesh.dp) for each in batch))).loss)
        every = await mesh.world.all_gather(torch.tensor([losses], dtype=torch.float64))
        assert (every == every[0]).all(), every  # to the bit
        return losses, await coordinator.whole_weights()


def _part(values: torch.Tensor, dp: Any) -> torch.Tensor:
    return values.chunk(dp.size)[dp.rank]


async def check(given: dict[str, Any], tolerance: float | None = None) -> None:
    """On every rank of a mesh: as one process would have it. One rank compares, for all have the same losses."""
    config = load_config(None, overrides=given)
    losses, weights = await train(given)
    if weights is None:
        return
    expected_losses, expected = plain_loop(config)
    in_float64 = config.train.precision == "float64"
    of_losses, of_weights = (1e-9, 1e-9) if in_float64 else (1e-4, 1e-5)
    if tolerance is not None:
        of_losses = of_weights = tolerance
    pairs = list(zip(losses, expected_losses, strict=True))
    assert losses[0] != losses[-1], losses
    assert all(abs(mine - theirs) < of_losses for mine, theirs in pairs), pairs
    assert list(weights) == list(expected)
    for name, values in expected.items():
        torch.testing.assert_close(
            weights[name], values, rtol=0, atol=of_weights, msg=lambda text, n=name: f"{n}: {text}"
        )


async def check_dropout(tp: int, *, sequence_parallel: bool) -> None:
    """What tensor-parallel ranks have in common stays the same on all of them."""
    given = settings(1, tp, 1, model__args__dropout=0.3, parallel__sequence_parallel=sequence_parallel)
    async with Coordinator.from_config(load_config(None, overrides=given)) as coordinator:
        for step in range(2):
            await coordinator.train_step(whole_batch(coordinator.config, step))
        for parameter, name in coordinator._model.names.items():
            if cut_of(parameter) is None:
                every = await coordinator.mesh.tp.all_gather(parameter.detach().clone().unsqueeze(0))
                assert (every == every[0]).all(), name


async def check_dropout_of_parts(tp: int) -> None:
    """Features that are cut over ranks are dropped by each for itself, also by a module that drops whole values too."""
    given = of_a_users_model(1, tp, 1, "dropping")
    async with Coordinator.from_config(load_config(None, overrides=given)) as coordinator:
        await coordinator.train_step(whole_batch(coordinator.config, 0))
        model, tp_group = coordinator._model.blueprint.model.whole, coordinator.mesh.tp
        for inner, outer in [each for block in model.blocks for each in block.kept]:
            parts = await tp_group.all_gather(inner.byte().unsqueeze(0))
            assert all((parts[0] != part).float().mean() > 0.3 for part in parts[1:]), "half of them differ by chance"
            wholes = await tp_group.all_gather(outer.byte().unsqueeze(0))
            assert (wholes == wholes[0]).all()
        masks = [inner for block in model.blocks for inner, _ in block.kept]
        assert len({each.numpy().tobytes() for each in masks}) == len(masks), "a mask came twice"
