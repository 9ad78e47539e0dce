"""Finds out what an engine can do."""
