"""Performs the core's commands and turns their results into events: the only code that awaits."""
