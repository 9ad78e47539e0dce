"""The router process: one address for clients, one for workers, and the decisions of `core` between."""
