"""Clients of chat endpoints, which take and return messages but no token ids."""
