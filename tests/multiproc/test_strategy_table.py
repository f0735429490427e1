"""A table of strategies in the configuration is followed, whatever moves the bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import parallel3d
from tests.support.ranks import Ranks, Tell, torch_variables

CONFIG = """
parallel: {{dp: 2}}
comm: {{backend: {backend}, strategy: adaptive, strategy_table: {{"1 KiB": tree, "1 MiB": ring}}}}
"""


async def follow(tell: Tell, path: str) -> None:
    async with parallel3d.mesh(path) as mesh:
        for numel in (10, 10_000):
            await mesh.world.all_reduce(torch.ones(numel))
        used = [event.strategy for event in mesh.collectives.events() if event.kind == "all_reduce"]
        tell((mesh.world.transport_name, used, str(mesh.world.explain(5))))


@pytest.mark.parametrize(("backend", "transport"), [("auto", "shared-memory"), ("gloo", "gloo")])
def test_a_table_is_followed(tmp_path: Path, backend, transport):
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG.format(backend=backend))
    with Ranks(follow, torch_variables(2), (str(path),)) as ranks:
        for rank in ranks:
            assert rank.hear() == (transport, ["tree", "ring"], "tree: pinned by comm.strategy_table")
        assert [rank.finish() for rank in ranks] == [0, 0]
