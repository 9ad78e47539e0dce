"""Simulates a run: the orchestrator's core under a virtual clock."""
