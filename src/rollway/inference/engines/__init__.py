"""Engines that take and return token ids: how each is asked, and how several act as one."""
