"""Messages to token ids and back."""
