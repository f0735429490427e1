"""Pipeline schedules: one action table for each, and everything reads it."""
