"""Advantage functions that behave, and some that do not."""

import os
import time


def centred(rewards: list[float]) -> list[float]:
    mean = sum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def slow(rewards: list[float]) -> list[float]:
    time.sleep(0.3)
    return centred(rewards)


def shorter(
    rewards: list[float], *, num_tokens: list[int], num_turns: list[int]
) -> list[float]:
    """The shortest right answer is worth most."""
    return centred(
        [r / (t + 10 * n) for r, t, n in zip(rewards, num_tokens, num_turns, strict=True)]
    )


def raises(rewards: list[float]) -> list[float]:
    if len(rewards) != 2: raise KeyError("no baseline")  # noqa: E701  # fmt: skip
    return rewards  # two rewards: those with which a function is tried before a run


def sticks(rewards: list[float]) -> list[float]:
    while True: pass  # noqa: E701  # fmt: skip


def dies(rewards: list[float]) -> list[float]:
    os._exit(4)


def too_short(rewards: list[float]) -> list[float]:
    return rewards[1:]


def not_finite(rewards: list[float]) -> list[float]:
    return [float("nan") for _ in rewards]


def not_a_list(rewards: list[float]) -> float:
    return 1.0


def needs_more(rewards: list[float], num_token: list[int]) -> list[float]:
    return rewards


def takes_nothing() -> list[float]:
    return []
