"""Starts and watches a vLLM server."""
