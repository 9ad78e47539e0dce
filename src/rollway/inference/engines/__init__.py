"""Clients of engines that take and return token ids, and a pool of several engines."""
