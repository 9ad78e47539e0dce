"""A run under a virtual clock: the real core, durations in place of everything else."""
