"""Built-in advantages: what a reward is worth next to those of its group."""

import math
from collections.abc import Callable, Sequence

Advantages = tuple[float, ...]
TINY = 1e-9


def grpo(rewards_G: Sequence[float]) -> Advantages:
    """A reward above the mean of its group. They sum to zero."""
    if not rewards_G:
        return ()
    mean = math.fsum(rewards_G) / len(rewards_G)
    return tuple(reward - mean for reward in rewards_G)


def rloo(rewards_G: Sequence[float]) -> Advantages:
    """A reward above the mean of the others: unbiased, as no reward is in its own baseline."""
    others = len(rewards_G) - 1
    if others < 1:
        return (0.0,) * len(rewards_G)
    return tuple(advantage * len(rewards_G) / others for advantage in grpo(rewards_G))


def grpo_std(rewards_G: Sequence[float]) -> Advantages:
    """GRPO divided by the standard deviation: easy and hard tasks pull equally hard."""
    above = grpo(rewards_G)
    spread = math.sqrt(math.fsum(one * one for one in above) / max(1, len(above)))
    return _scaled(above, spread)


def grpo_max(rewards_G: Sequence[float]) -> Advantages:
    """GRPO divided by the largest deviation: from -1 to 1, whatever the rewards' scale."""
    above = grpo(rewards_G)
    return _scaled(above, max(map(abs, above), default=0.0))


def _scaled(above_G: Advantages, by: float) -> Advantages:
    return tuple(one / by if by > TINY else 0.0 for one in above_G)


BASELINES: dict[str, Callable[[Sequence[float]], Advantages]] = {
    "grpo": grpo, "rloo": rloo, "grpo_std": grpo_std, "grpo_max": grpo_max
}  # fmt: skip
