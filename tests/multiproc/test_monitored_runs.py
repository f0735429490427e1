"""Runs that are watched while they go on: scraped, by a hundred at a time, over TLS, and each rank by itself."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import stat
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import trustme
from prometheus_client.parser import text_string_to_metric_families

from monitoring.events.time_parts import PARTS
from parallel3d.config import RunConfig, load_config
from runtime.errors import ConfigError
from tests.support.processes import Started
from tests.support.prometheus import check_metrics
from tests.support.ranks import torch_variables
from tests.support.stand_in import stand_in_run

SECONDS = 100.0  # a run on a busy machine may take half a minute

FOR_EVER = 1_000_000
Values = Mapping[str, Mapping[tuple[tuple[str, str], ...], float]]


def config_of(folder: Path, steps: int = FOR_EVER, **overrides: Any) -> RunConfig:
    given = {"parallel.dp": 2, "train.steps": steps, "runtime.run_dir": str(folder / "run"), "comm.timeout": 20}
    return load_config(None, overrides={**given, **overrides}, environ={})


async def get(session: aiohttp.ClientSession, url: str, **options: Any) -> tuple[int, str]:
    async with session.get(url, **options) as answer:
        return answer.status, await answer.text()


async def scrape_until(url: str, wanted: str, **options: Any) -> str:
    """The metrics, once they have these words."""
    async with aiohttp.ClientSession() as session, asyncio.timeout(SECONDS):
        while True:
            _, text = await get(session, url, **options)
            if wanted in text:
                return text
            await asyncio.sleep(0.1)


def values_of(text: str) -> Values:
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = tuple(sorted(sample.labels.items()))
            found.setdefault(sample.name.removeprefix("parallel3d_"), {})[labels] = sample.value
    return found


def endpoints(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "run" / "endpoints.json").read_text())


async def test_a_run_is_scraped_while_it_goes_on_and_leaves_nothing(tmp_path):
    threads = threading.active_count()
    async with asyncio.timeout(SECONDS), stand_in_run(config_of(tmp_path)) as run:
        known = dict(run.endpoints)
        assert endpoints(tmp_path) == known
        assert stat.S_IMODE((tmp_path / "run" / "endpoints.json").stat().st_mode) == 0o600
        text = await scrape_until(known["metrics"], 'parallel3d_straggler_score_ratio{rank="1"}')
        await run.stop()
        async for step in run:
            last = step
    check_metrics(text)
    found = values_of(text)
    assert 0 < found["steps_total"][(("outcome", "ok"),)] <= last.step + 1
    for rank in ("0", "1"):
        phases = [found["phase_seconds_total"][("phase", phase), ("rank", rank)] for phase in PARTS]
        assert sum(phases) > 0
        assert found["unattributed_seconds_total"][(("rank", rank),)] <= 0.02 * sum(phases)
    assert found["collective_bytes_total"][("axis", "dp"), ("op", "all_reduce")] >= 2 * 4096
    async with aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.ClientConnectorError):
            await get(session, known["metrics"])
    assert endpoints(tmp_path) == run.endpoints == {"run_id": run.run_id, "pid": os.getpid()}
    threads_left = [thread.name for thread in threading.enumerate() if "parallel3d-monitor" in thread.name]
    assert (threads_left, threading.active_count() - threads <= 2) == ([], True)  # asyncio keeps threads of its own


@pytest.mark.slow
async def test_a_hundred_scrapes_at_a_time_are_all_answered(tmp_path):
    async with asyncio.timeout(SECONDS), stand_in_run(config_of(tmp_path)) as run:
        async with aiohttp.ClientSession() as session:
            asked = (get(session, run.endpoints["metrics"]) for _ in range(100))
            answers = await asyncio.gather(*asked)
        assert {status for status, _ in answers} == {200}
        steps = [step async for step in _next(run, 3)]
        assert len(steps) == 3
        await run.stop()


async def _next(run, number: int):
    for _ in range(number):
        yield await anext(run)


@pytest.mark.slow
async def test_elsewhere_than_on_loopback_it_takes_the_token_and_tls(tmp_path):
    authority = trustme.CA()
    issued, trusted = authority.issue_cert("localhost"), ssl.create_default_context()
    authority.configure_trust(trusted)
    issued.private_key_pem.write_to_path(str(tmp_path / "key.pem"))
    issued.cert_chain_pems[0].write_to_path(str(tmp_path / "cert.pem"))
    (tmp_path / "token").write_text("a-token-of-16-characters")
    watched = {
        "monitoring.host": "0.0.0.0",
        "monitoring.token_file": str(tmp_path / "token"),
        "monitoring.tls_certificate": str(tmp_path / "cert.pem"),
        "monitoring.tls_key": str(tmp_path / "key.pem"),
    }
    async with asyncio.timeout(SECONDS), stand_in_run(config_of(tmp_path, **watched)) as run:
        assert run.endpoints["metrics"].startswith("https://")
        assert run.endpoints["page"].endswith("/?token=a-token-of-16-characters")
        port = run.endpoints["metrics"].rpartition(":")[2]
        url = f"https://localhost:{port}"
        async with aiohttp.ClientSession() as session:
            assert (await get(session, url, ssl=trusted))[0] == 401
        bearer = {"Authorization": "Bearer a-token-of-16-characters"}
        await scrape_until(url, 'parallel3d_steps_total{outcome="ok"} ', ssl=trusted, headers=bearer)
        await run.stop()


@pytest.mark.slow
async def test_each_rank_can_be_scraped_by_itself(tmp_path):
    async with asyncio.timeout(SECONDS), stand_in_run(config_of(tmp_path, **{"monitoring.per_rank": True})) as run:
        await anext(run)
        sd = await scrape_until(run.endpoints["sd"], '"rank": "1"')
        listed = json.loads(sd)
        while len(listed) < 2:
            listed = json.loads(await scrape_until(run.endpoints["sd"], '"rank": "0"'))
        assert [(each["labels"]["rank"], each["labels"]["dp"]) for each in listed] == [("0", "0"), ("1", "1")]
        for each in listed:
            (target,) = each["targets"]
            url = f"{each['labels']['__scheme__']}://{target}/metrics"
            text = await scrape_until(url, 'parallel3d_rank_collective_bytes_total{axis="dp"')
            check_metrics(text)
            found = values_of(text)
            assert found["rank_event_loop_lag_seconds_count"][()] >= 0
            assert found["rank_memory_bytes"][(("kind", "weights"),)] == 24
            assert found["rank_events_dropped_total"][()] >= 0  # its steps take no time, and some thousands a second
            async with aiohttp.ClientSession() as session:
                assert (await get(session, f"http://{target}/"))[0] == 401
        await run.stop()


async def test_a_port_that_is_taken_starts_nothing(tmp_path):
    async with asyncio.timeout(SECONDS):
        async with stand_in_run(config_of(tmp_path / "one", steps=3)) as run:
            port = int(run.endpoints["metrics"].rpartition(":")[2].removesuffix("/metrics"))
            other = stand_in_run(config_of(tmp_path / "other", **{"monitoring.port": port}))
            with pytest.raises(ConfigError, match=rf"monitoring.port = {port}: .* Address already in use"):
                await other.__aenter__()
            await run.summary()
    assert not (tmp_path / "other").exists()


async def test_a_run_that_is_not_watched(tmp_path):
    async with asyncio.timeout(SECONDS), stand_in_run(config_of(tmp_path, 3, **{"monitoring.enabled": False})) as run:
        assert run.endpoints.keys() == {"run_id", "pid"}
        assert not [thread for thread in threading.enumerate() if "parallel3d-monitor" in thread.name]
        summary = await run.summary()
    assert summary.losses == (10.0, 9.0, 8.0)


RUN = """
model: {factory: gpt, args: {layers: 2, width: 32, heads: 2, vocabulary: 256, sequence: 16}}
parallel: {dp: 2}
runtime: {threads: 1, run_dir: run}
train: {steps: 1000000, batch_size: 8}
"""


@pytest.mark.slow
async def test_without_a_supervisor_rank_0_serves_all(tmp_path):
    (tmp_path / "run.yaml").write_text(RUN)
    command = ("-m", "parallel3d", "run", "run.yaml")
    with ExitStack() as stack:
        first, other = (
            stack.enter_context(Started(*command, cwd=tmp_path, TMPDIR=str(tmp_path), **each))
            for each in torch_variables(2)
        )
        await asyncio.to_thread(first.stderr.wait_for, r"^page: http://127\.0\.0\.1:\d+/\?token=\S+$")
        text = await scrape_until(endpoints(tmp_path)["metrics"], 'parallel3d_straggler_score_ratio{rank="1"}')
        check_metrics(text)
        found = values_of(text)
        assert {dict(labels)["rank"] for labels in found["phase_seconds_total"]} == {"0", "1"}
        assert {dict(labels)["dp"] for labels in found["rank_info"]} == {"0", "1"}
        for each in (first, other):
            each.process.kill()
