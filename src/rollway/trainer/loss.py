"""The clipped, importance-weighted policy-gradient loss."""

import torch
from torch import Tensor


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
    ratio = torch.exp(logprobs - engine_logprobs)
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    gain, bounded_gain = ratio * advantages, bounded * advantages
    return -torch.minimum(gain, bounded_gain), bounded_gain < gain


def token_sums(
    logprobs: Tensor, engine_logprobs: Tensor, clipped: Tensor, entropy: Tensor
) -> list[float]:
    """Return five sums over the trained tokens, for metrics: 1, clipped, ratio, KL and entropy."""
    log_ratio = logprobs - engine_logprobs
    ratio = log_ratio.exp()
    sums = (clipped.sum(), ratio.sum(), (ratio - 1 - log_ratio).sum(), entropy.sum())
    return [len(logprobs), *map(float, sums)]
