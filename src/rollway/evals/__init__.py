"""Evaluates a model on an environment: the specification, its rollouts, and their statistics."""
