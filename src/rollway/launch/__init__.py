"""Starts the parts of a run, watches them, ends them together."""
