"""Hugging Face causal language models as engine and trainer use them. Needs the `local` extra."""
