"""Evaluates an environment against an endpoint: what is asked, how it went, what it says."""
