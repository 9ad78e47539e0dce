"""GRPO without the standard deviation: a rollout's reward above the mean of its group."""

import math
from collections.abc import Sequence


def advantages(rewards_G: Sequence[float]) -> tuple[float, ...]:
    """One advantage for each reward; they sum to zero."""
    if not rewards_G:
        return ()
    mean = math.fsum(rewards_G) / len(rewards_G)
    return tuple(reward - mean for reward in rewards_G)
