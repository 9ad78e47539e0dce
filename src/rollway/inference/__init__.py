"""Asking an engine: messages become token ids here, and what the model drew is never re-tokenised."""
