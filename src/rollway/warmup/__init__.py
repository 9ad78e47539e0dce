"""Builds the tiny model of the demo, taught by an environment's answers."""
