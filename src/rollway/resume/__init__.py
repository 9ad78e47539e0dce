"""Where an interrupted run continues, from what its run directory holds."""
