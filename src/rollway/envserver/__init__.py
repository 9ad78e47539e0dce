"""Serves one environment: a router, and workers that alone run the environment's code."""
