"""Gradients of one rank: buckets, deferred weight gradients, and the reduction over replicas."""
