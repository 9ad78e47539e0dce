"""Threads and processes that run the work that would hold an event loop."""
