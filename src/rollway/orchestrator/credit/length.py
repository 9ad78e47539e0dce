"""Makes long right answers worth less than short ones, and wrong ones no better for being short."""

from collections.abc import Sequence


def shortened(
    rewards_G: Sequence[float], lengths_G: Sequence[int], weight: float, correct_at: float
) -> tuple[float, ...]:
    """Rewards with up to `weight` taken off the longest right answer of the group, nothing off the
    shortest, and nothing off answers that are not right: below `correct_at`."""
    right = [length for reward, length in zip(rewards_G, lengths_G, strict=True) if reward >= correct_at]
    if not weight or len(right) < 2 or min(right) == max(right):
        return tuple(rewards_G)
    shortest, span = min(right), max(right) - min(right)
    return tuple(
        reward - weight * (length - shortest) / span if reward >= correct_at else reward
        for reward, length in zip(rewards_G, lengths_G, strict=True)
    )
