"""A rollout's columns on their way to the trainer: written once at the edge, mapped once at the end."""
