"""The run's memory: every rollout's life, in SQLite."""
