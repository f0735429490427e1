"""Replicas that are processes: buckets in shared memory, reduced and gathered in place, give what a plain loop does."""

from __future__ import annotations

import os

import pytest
import torch

import parallel3d
from tests.support.ranks import Ranks, Tell, torch_variables
from tests.support.replicas import EVERY_OPTIMIZER, Replica, Trained, assert_close, assert_same, make_stages, plain_loop

WIDTH = 101  # a block is 0.3 MB in float64: more than what passes through staging slots
CONFIG = EVERY_OPTIMIZER["sgd"]


async def train(tell: Tell) -> None:
    size = int(os.environ["WORLD_SIZE"])
    async with parallel3d.mesh(dp=size, threads=1) as mesh:
        assert mesh.dp.transport_name == "shared-memory"
        for dtype in (torch.float32, torch.float64):
            trained = []
            for shard in (False, True):
                stages = make_stages(2, dtype, WIDTH)
                replica = Replica(mesh, stages, CONFIG, bucket_bytes=200_000, shard=shard)
                assert len(replica.sync.buckets) >= 4
                trained.append(await replica.train(3, dtype, WIDTH))
                buckets = replica.sync.buckets
                assert replica.sync.reduced.num_bytes == sum(each.flat_gradients.nbytes for each in buckets)
                assert replica.sync.bus_bandwidth > 0
            assert_same(trained)
        tell((trained[0].norms, [each.numpy() for each in trained[0].weights]))


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_training_equals_a_plain_loop_and_sharding_changes_no_bit(size):
    with Ranks(train, torch_variables(size)) as ranks:
        expected = plain_loop(make_stages(2, torch.float64, WIDTH), CONFIG, 3, torch.float64, WIDTH)
        for rank in ranks:
            norms, weights = rank.hear()
            assert_close(Trained(norms, list(map(torch.from_numpy, weights))), expected, 1e-12)
        assert [rank.finish() for rank in ranks] == [0] * size
