"""What a gradient server refuses: by name, and the run halts or goes on without that worker."""

from __future__ import annotations

import math

import numpy
import pytest

from runtime.errors import Mismatch, NonFiniteGradient
from runtime.gradient_server.wire.messages import (
    Assignment,
    Dtype,
    GradientDone,
    Kind,
    Part,
    Refused,
    Table,
)
from tests.support.gradient_clients import (
    ClientV2,
    block_v1,
    component_v1,
    floats,
    gradient_v1,
)
from tests.support.gradient_runs import (
    assigned_v1,
    assignments,
    joined_v1,
    joined_v2,
    on_uvloop,
    serving,
    until,
)

# Refusals of version 1: the run halts, and names who and why.

GOOD = {
    "whole": lambda worker: gradient_v1(0, worker, [1, 2], total=4),
    "block": lambda worker: block_v1(0, worker, 0, 2, [1, 2], [1, 1]),
    "component": lambda worker: component_v1(0, worker, 0, [1, 2]),
}


@pytest.mark.parametrize(
    ("good", "bad", "reason", "detail"),
    [
        ("whole", gradient_v1(1, 1, [1, 2], total=4), "future_step", "1, in step 0."),
        ("whole", gradient_v1(0, 0, [1, 2], total=4), "wrong_worker", "0, from worker 1."),
        (
            "whole",
            gradient_v1(0, 1, [1, 2, 3], total=4),
            "wrong_length",
            "the gradient: 3 elements where worker 0 had 2.",
        ),
        ("whole", gradient_v1(0, 1, [1, 2], total=3), "wrong_total", "3 samples where [4, 8) are 4."),
        ("whole", gradient_v1(0, 1, [1, math.nan], total=4), "not_finite", "the gradient from element 0 on."),
        ("whole", gradient_v1(0, 1, [math.inf, 1], total=4), "not_finite", "the gradient from element 0 on."),
        ("whole", gradient_v1(0, 1, [], total=4), "wrong_length", "the gradient: 0 elements where worker 0 had 2."),
        ("whole", block_v1(0, 1, 0, 2, [1, 2]), "unexpected", "blocks in a step that others send as whole."),
        ("whole", component_v1(0, 1, 0, [1]), "unexpected", "lm_head in a step that others send as whole."),
        ("block", block_v1(0, 1, 2, 2, [1, 2], [1, 1]), "wrong_block", "block 2 of 2."),
        ("block", block_v1(0, 1, 0, 3, [1, 2], [1, 1]), "wrong_block", "3 blocks where other workers have 2."),
        ("block", block_v1(0, 1, 0, 2, [1, 2], [2]), "wrong_sizes", "block 0: sizes (2,) where worker 0 had (1, 1)."),
        ("block", block_v1(0, 1, 0, 2, [1, 2], [1]), "wrong_sizes", "block 0: sizes add up to 1, not 2."),
        ("component", component_v1(0, 1, 3, [1, 2]), "wrong_component", ""),
        ("component", component_v1(0, 1, 0, [1]), "wrong_length", "lm_head: 1 elements where worker 0 had 2."),
        ("component", component_v1(0, 1, 0, [1, math.nan]), "not_finite", "lm_head from element 0 on."),
    ],
    ids=lambda value: "" if isinstance(value, bytes) else value,
)
@on_uvloop
async def test_what_halts_a_run_of_version_1(good, bad, reason, detail):
    async with serving() as run:
        clients = await assigned_v1(run)
        before = run.server.figures().bytes_in
        clients[0].send(GOOD[good](0))
        await until(lambda: run.server.figures().bytes_in == before + len(GOOD[good](0)))
        clients[1].send(bad)
        for client in clients:
            assert await client.read() == ("shutdown",)
            assert await client.is_over()
        message = await run.failure(NonFiniteGradient if reason == "not_finite" else Mismatch)
        assert "worker 1 (old-1)" in message
        assert "step 0" in message
        assert f"{reason}: " in message
        assert message.endswith(detail)
        assert run.refused() == {reason: 1}


@on_uvloop
async def test_an_old_step_of_version_1():
    async with serving() as run:
        clients = await joined_v1(run)
        for step in range(2):
            for client in clients:
                await client.read()
                client.send(gradient_v1(step if client.worker else 0, client.worker, [1.0], total=4))
            if step == 0:
                for client in clients:
                    assert (await client.read())[0] == "average"
        assert await run.failure(Mismatch) == "worker 0 (old-0) at step 1: old_step: a step that is over: 0, in step 1."


@on_uvloop
async def test_a_refused_gradient_and_the_others_go_on():
    async with serving(workers=3, samples=12, policy="go on", steps=2) as run:
        clients = await assigned_v1(run, 3)
        clients[0].send(gradient_v1(0, 0, [1.0], loss=1.0, total=4))
        clients[1].send(gradient_v1(0, 1, [math.nan], loss=9.0, total=4))
        assert await clients[1].read() == ("shutdown",)
        clients[2].send(gradient_v1(0, 2, [3.0], loss=2.0, total=4))
        others = [clients[0], clients[2]]
        for client in others:
            assert await client.read() == ("average", 0, [2.0], 1.5)
        assert [await client.read() for client in others] == [("assignment", 1, 0, 6), ("assignment", 1, 6, 12)]
        for client in others:
            client.send(gradient_v1(1, client.worker, [1.0], total=6))
        for client in others:
            assert (await client.read())[0] == "average"
            assert await client.read() == ("shutdown",)
        await run.end()
        assert run.refused() == {"not_finite": 1}


# Refusals of version 2.


async def misbehave(client, given, how):
    step, attempt = given.step, given.attempt
    match how:
        case "old_step":
            client.send_table(step - 1, 0, [floats(1, 2)])
        case "future_step":
            client.send_table(step + 1, 0, [floats(1, 2)])
        case "wrong_attempt":
            client.send_table(step, attempt + 1, [floats(1, 2)])
        case "wrong_sizes":
            client.send_table(step, attempt, [floats(1), floats(2)])
        case "bad_dtype":
            client.send_table(step, attempt, [floats(1, 2)], dtype=Dtype.FLOAT16)
        case "integers":
            client.send_table(step, attempt, [floats(1, 2)], dtype=Dtype.INT64)
        case "no such message":
            client.link.write(bytes.fromhex("00000001 99"))
        case "wrong_length":
            client.send_table(step, attempt, [floats(1, 2, 3)])
        case "not_finite":
            client.send_tensors(step, attempt, [floats(1, math.nan)])
        case "wrong_total":
            client.send_tensors(step, attempt, [floats(1, 2)])
            client.send(GradientDone(step, attempt, 0.0, 0, 1))
        case "too early an end":
            client.send_table(step, attempt, [floats(1, 2)])
            client.send(GradientDone(step, attempt, 0.0, 0, 4))
        case "a gap":
            client.send_table(step, attempt, [floats(1, 2)])
            client.send_chunk(step, attempt, 0, 1, floats(2))
        case "another element size":
            client.send_table(step, attempt, [floats(1, 2)])
            client.send_chunk(step, attempt, 0, 0, numpy.zeros(2))
        case "no such part":
            client.send_table(step, attempt, [floats(1, 2)])
            client.send_chunk(step, attempt, 7, 0, floats(2))
        case "twice":
            client.send_table(step, attempt, [floats(1, 2)])
            client.send_table(step, attempt, [floats(1, 2)])
        case "a state unasked for":
            client.send_table(step, 1, [floats(1, 2)], Kind.STATE)
        case "over_budget":
            client.send(Table(Kind.GRADIENT, step, attempt, (Part(Dtype.FLOAT32, 1 << 60),)))


BAD = [
    ("old_step", "old_step"),
    ("future_step", "future_step"),
    ("wrong_attempt", "wrong_attempt"),
    ("wrong_sizes", "wrong_sizes"),
    ("bad_dtype", "bad_dtype"),
    ("integers", "bad_dtype"),
    ("no such message", "unknown_tag"),
    ("wrong_length", "wrong_length"),
    ("not_finite", "not_finite"),
    ("wrong_total", "wrong_total"),
    ("too early an end", "wrong_length"),
    ("a gap", "wrong_length"),
    ("another element size", "wrong_length"),
    ("no such part", "unexpected"),
    ("twice", "unexpected"),
    ("a state unasked for", "unexpected"),
    ("over_budget", "wrong_length"),
]


@pytest.mark.parametrize(("how", "reason"), BAD)
@on_uvloop
async def test_what_halts_a_run_of_version_2(how, reason):
    async with serving() as run:
        clients = await joined_v2(run)
        for client, given in zip(clients, await assignments(clients), strict=True):
            client.send_gradient(given, [floats(1, 2)])
        for client in clients:
            await client.tensors()
        given = await assignments(clients)
        clients[0].send_gradient(given[0], [floats(1, 2)])
        await misbehave(clients[1], given[1], how)
        for client in clients:
            assert (await client.skip_to(Refused)).reason == reason
            await client.gone()
        message = await run.failure(NonFiniteGradient if reason == "not_finite" else Mismatch)
        assert message.startswith("worker 1 (node-1) at step 1: ")
        assert run.refused() == {reason: 1}


@pytest.mark.parametrize("how", ["not_finite", "wrong_total", "wrong_length", "integers"])
@on_uvloop
async def test_a_worker_of_version_2_is_dropped_and_the_others_go_on(how):
    async with serving(workers=3, samples=12, policy="go on") as run:
        clients = await joined_v2(run, 3)
        for client, given in zip(clients, await assignments(clients), strict=True):
            client.send_gradient(given, [floats(1, 2)])
        for client in clients:
            await client.tensors()
        given = await assignments(clients)
        clients[0].send_gradient(given[0], [floats(1, 2)])
        await misbehave(clients[1], given[1], how)
        reason = dict(BAD)[how]
        assert (await clients[1].skip_to(Refused)).reason == reason
        others = [clients[0], clients[2]]
        given = await assignments(others)
        assert given == [Assignment(1, 1, 0, 6, 12), Assignment(1, 1, 6, 12, 12)]
        others[0].send_gradient(given[0], [floats(2, 2)])
        others[1].send_gradient(given[1], [floats(4, 6)])
        for client in others:
            assert (await client.tensors()).arrays[0].tolist() == [3, 4]
        again = await ClientV2.join(run.address, "node-1", step=2, has_state=True)
        assert (await again.expect(Refused)).detail.startswith(f"node-1 was dropped: {reason}: ")


@on_uvloop
async def test_the_last_worker_that_is_refused_ends_the_run():
    async with serving(workers=1, policy="go on") as run:
        (client,) = await joined_v2(run, 1)
        await misbehave(client, await client.expect(Assignment), "not_finite")
        assert (await client.expect(Refused)).reason == "not_finite"
        await run.failure(NonFiniteGradient)


@on_uvloop
async def test_one_that_was_not_asked_is_refused_and_disturbs_nobody():
    async with serving(workers=1) as run:
        (client,) = await joined_v2(run, 1)
        given = await client.expect(Assignment)
        late = await ClientV2.join(run.address, "late")
        late.send_table(0, 0, [floats(1)])
        assert (await late.expect(Refused)).reason == "future_step"
        client.send_gradient(given, [floats(1)])
        assert (await client.tensors()).arrays[0].tolist() == [1]


@on_uvloop
async def test_a_gradient_that_takes_too_long():
    async with serving(step_seconds=0.3, policy="go on") as run:
        clients = await joined_v2(run)
        given = await assignments(clients)
        clients[0].send_gradient(given[0], [floats(1)])
        assert (await clients[1].expect(Refused)).reason == "too_slow"
        assert await clients[0].expect(Assignment) == Assignment(0, 1, 0, 8, 8)
        assert run.refused() == {"too_slow": 1}


@on_uvloop
async def test_a_gradient_that_takes_too_long_halts_the_run():
    async with serving(step_seconds=0.3) as run:
        clients = await joined_v2(run)
        given = await assignments(clients)
        clients[0].send_gradient(given[0], [floats(1)])
        for client in clients:
            assert (await client.skip_to(Refused)).reason == "too_slow"
        assert (await run.failure(Mismatch)).endswith("no gradient of step 0 within 0.3 s.")
        assert run.refused() == {"too_slow": 1}
