"""The clipped, importance-weighted policy-gradient loss."""

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""A larger difference of two logprobs counts as this: its exponential would make the loss infinite."""


def log_ratio(logprobs: Tensor, engine_logprobs: Tensor) -> Tensor:
    return (logprobs - engine_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def policy_loss(
    logprobs: Tensor,
    engine_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, Tensor]:
    """Return the loss of each token, and whether its ratio was clipped: the ratio of the trained policy
    to the one that drew the token, whichever version and numerics that had."""
    ratio = torch.exp(log_ratio(logprobs, engine_logprobs))
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    gain, bounded_gain = ratio * advantages, bounded * advantages
    return -torch.minimum(gain, bounded_gain), bounded_gain < gain


def token_sums(
    logprobs: Tensor, engine_logprobs: Tensor, clipped: Tensor, entropy: Tensor
) -> list[float]:
    """Return six sums over the trained tokens, for metrics: 1, clipped, ratio, KL, entropy, and whether
    the ratio was limited by MAX_LOG_RATIO."""
    logs = log_ratio(logprobs, engine_logprobs)
    ratio, limited = logs.exp(), logs.abs() == MAX_LOG_RATIO
    kl = mismatch_kl(logprobs, engine_logprobs)
    sums = (clipped.sum(), ratio.sum(), kl.sum(), entropy.sum(), limited.sum())
    return [len(logprobs), *map(float, sums)]


def mismatch_kl(logprobs: Tensor, engine_logprobs: Tensor) -> Tensor:
    """Return an estimate of the KL between trainer and engine for each token. It is never negative."""
    logs = log_ratio(logprobs, engine_logprobs)
    return (logs.expm1() - logs).clamp(min=0)
