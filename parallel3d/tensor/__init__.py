"""Tensor parallelism: plans, shards, and the layers that are cut over ranks."""
