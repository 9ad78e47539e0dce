"""The run's memory: what became of every rollout, in SQLite."""
