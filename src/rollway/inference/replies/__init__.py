"""Turns an engine's reply into columns. Large bodies are cut apart before anything is parsed."""
