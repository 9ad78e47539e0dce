"""A rollout's columns on their way to the trainer: a worker writes them once, the trainer maps them."""
