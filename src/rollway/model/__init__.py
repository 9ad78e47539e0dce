"""Hugging Face language models, for the embedded engine and the trainer. Needs the `local` extra."""
