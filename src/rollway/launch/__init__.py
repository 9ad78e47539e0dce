"""Starts the processes of a run, watches them, and ends them together."""
