"""The clipped, importance-weighted policy-gradient loss."""

import torch
from msgspec import Struct


class TokenStats(Struct, frozen=True):
    """Sums over the trained tokens of a micro-batch, for reporting."""

    num_tokens: int
    clipped: float
    ratio: float
    kl: float
    entropy: float


def policy_loss(
    logprobs: torch.Tensor, engine_logprobs: torch.Tensor, advantages: torch.Tensor,
    weights: torch.Tensor, *, clip_low: float, clip_high: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Loss of each token times its weight, and whether its ratio was clipped.

    The ratio is that of the trained policy to the one that drew the token, whichever version and
    numerics that had.
    """
    ratio = torch.exp(logprobs - engine_logprobs)
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    gain, bounded_gain = ratio * advantages, bounded * advantages
    return -weights * torch.minimum(gain, bounded_gain), bounded_gain < gain


def token_stats(
    logprobs: torch.Tensor, engine_logprobs: torch.Tensor, clipped: torch.Tensor,
    entropy: torch.Tensor,
) -> TokenStats:  # fmt: skip
    log_ratio = logprobs - engine_logprobs
    ratio = log_ratio.exp()
    return TokenStats(
        num_tokens=len(logprobs),
        clipped=float(clipped.sum()),
        ratio=float(ratio.sum()),
        kl=float((ratio - 1 - log_ratio).sum()),
        entropy=float(entropy.sum()),
    )
