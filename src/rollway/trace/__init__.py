"""Turns a rollout's turns into rows. Pure: no I/O, no clock, and work linear in tokens."""
