"""Chat endpoints: messages in, a message out, no token ids."""
