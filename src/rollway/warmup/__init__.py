"""Builds a tiny model for a run without one, and teaches it an environment's answers a little."""
