"""Learns from batches: maps payload, replays routes, steps, writes weights. Needs the `local` extra."""
