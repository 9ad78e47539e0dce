"""Child processes: how they are started, how they talk to their parent, and how they end with it."""
