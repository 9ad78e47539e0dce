"""The router process: passes messages between clients and workers, and keeps workers alive."""
