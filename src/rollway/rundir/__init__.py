"""The run directory, which holds everything of a run."""
