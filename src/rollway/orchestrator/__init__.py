"""Decides what runs, what trains and what is thrown away. `core` decides, `shell` does."""
