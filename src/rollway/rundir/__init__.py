"""The run directory: where everything of a run lies."""
