"""Gradients of one rank: buckets, when they are complete, and how replicas reduce them."""
