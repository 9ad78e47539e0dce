"""Turns in, rows out. Pure: no I/O, no clock, and work linear in tokens."""
