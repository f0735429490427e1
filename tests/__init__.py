"""Tests, in tiers."""
