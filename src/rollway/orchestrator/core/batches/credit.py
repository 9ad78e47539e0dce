"""From a group's rewards to its rollouts' advantages: the built-in ways, and the length penalty."""

import math
from collections.abc import Callable, Sequence

Advantages = tuple[float, ...]
Rewards = Sequence[float]
TINY = 1e-9


def grpo(rewards_G: Rewards) -> Advantages:
    """Reward minus the mean of its group. The advantages of a group sum to zero."""
    if not rewards_G:
        return ()
    mean = math.fsum(rewards_G) / len(rewards_G)
    return tuple(reward - mean for reward in rewards_G)


def rloo(rewards_G: Rewards) -> Advantages:
    """Reward minus the mean of the others. It is unbiased, as no reward is part of its own baseline."""
    others = len(rewards_G) - 1
    if others < 1:
        return (0.0,) * len(rewards_G)
    return tuple(advantage * len(rewards_G) / others for advantage in grpo(rewards_G))


def grpo_std(rewards_G: Rewards) -> Advantages:
    """GRPO divided by the standard deviation of the group: easy and hard tasks pull equally hard."""
    deviations_G = grpo(rewards_G)
    squares = math.fsum(deviation * deviation for deviation in deviations_G)
    return _scale(deviations_G, math.sqrt(squares / max(1, len(deviations_G))))


def grpo_max(rewards_G: Rewards) -> Advantages:
    """GRPO divided by the group's largest deviation: from -1 to 1, whatever the scale of rewards."""
    deviations_G = grpo(rewards_G)
    return _scale(deviations_G, max(map(abs, deviations_G), default=0.0))


def _scale(deviations_G: Advantages, by: float) -> Advantages:
    return tuple(deviation / by if by > TINY else 0.0 for deviation in deviations_G)


BASELINES: dict[str, Callable[[Rewards], Advantages]] = {
    "grpo": grpo,
    "rloo": rloo,
    "grpo_std": grpo_std,
    "grpo_max": grpo_max,
}


def penalise_length(
    rewards_G: Rewards, lengths_G: Sequence[int], weight: float, correct_at: float
) -> tuple[float, ...]:
    """Return the rewards, less for long right answers: the longest right answer of the group loses
    `weight`, the shortest nothing. Wrong answers, those below `correct_at`, keep their reward."""
    pairs = list(zip(rewards_G, lengths_G, strict=True))
    right = [length for reward, length in pairs if reward >= correct_at]
    if not weight or len(right) < 2 or min(right) == max(right):
        return tuple(rewards_G)
    shortest, span = min(right), max(right) - min(right)

    def penalise(reward: float, length: int) -> float:
        is_right = reward >= correct_at
        return reward - weight * (length - shortest) / span if is_right else reward

    return tuple(penalise(reward, length) for reward, length in pairs)
