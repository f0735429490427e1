"""Tensor parallelism: plans, shards, sharded layers, and what ranks exchange around them."""
