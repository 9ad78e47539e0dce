"""Finds where an interrupted run continues, and repairs what the interruption left."""
