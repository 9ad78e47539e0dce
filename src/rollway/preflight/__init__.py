"""Finds mistakes in a run before anything heavy starts: no model is loaded, nothing is written."""
