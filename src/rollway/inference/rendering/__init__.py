"""Renders messages to token ids, and parses token ids to messages."""
