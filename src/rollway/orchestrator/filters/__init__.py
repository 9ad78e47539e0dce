"""Which closed groups are worth a step. Pure."""
