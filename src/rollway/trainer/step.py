"""One optimizer step from one manifest."""

from typing import Any

import torch

from ..config.sections import TrainerConfig
from ..errors import ModelError
from ..payload.reader import SegmentReader
from ..records.batch import BatchManifest
from .forward import token_logprobs
from .loss import TokenStats, policy_loss, token_stats
from .packing import load_micro_batch
from .ranks import Ranks


class Learner:
    """A model and its optimizer."""

    def __init__(self, model: Any, config: TrainerConfig, ranks: Ranks | None = None) -> None:
        self.model = model.train()
        self._config = config
        self._ranks = ranks or Ranks()
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=config.lr, weight_decay=config.weight_decay, betas=(0.9, 0.95)
        )

    def step(self, manifest: BatchManifest, reader: SegmentReader) -> dict[str, float]:
        """Gradients of this rank's micro-batches, summed over all ranks, one update; the step's metrics.

        Each loss is divided by the tokens of the whole batch, so the sum is what one rank would have.
        """
        lr = self._config.lr * min(1.0, manifest.step / max(1, self._config.lr_ramp_steps))
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.zero_grad(set_to_none=True)
        total, stats = 0.0, []
        for indices in self._ranks.share(manifest.ranks):
            rows = [manifest.rows[index] for index in indices]
            loss, seen = self._backward(reader, rows, manifest.num_trainable)
            total += loss
            stats.append(seen)
        self._ranks.sum_gradients(self.model.parameters())
        total, *sums = self._ranks.sum([total, *_sums(stats)])
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._config.max_grad_norm)
        if not torch.isfinite(norm):
            raise ModelError(f"the gradient of step {manifest.step} is not finite; nothing was updated")
        self.optimizer.step()
        return {"loss": total, "grad_norm": float(norm), "lr": lr, **_means(*sums)}

    def _backward(
        self, reader: SegmentReader, rows: list[Any], num_trainable: int
    ) -> tuple[float, TokenStats]:
        packed = load_micro_batch(reader, rows)
        logprobs, entropy = token_logprobs(self.model, packed, replay_routes=self._config.replay_routes)
        engine_logprobs = packed.logprobs.to(logprobs.device)
        losses, clipped = policy_loss(
            logprobs, engine_logprobs, packed.advantages.to(logprobs.device),
            packed.token_weights.to(logprobs.device),
            clip_low=self._config.clip_low, clip_high=self._config.clip_high,
        )  # fmt: skip
        loss = losses.sum() / num_trainable
        loss.backward()
        seen = token_stats(logprobs.detach(), engine_logprobs, clipped, entropy)
        return float(loss.detach()), seen


def _sums(stats: list[TokenStats]) -> tuple[float, ...]:
    return (
        sum(one.num_tokens for one in stats),
        sum(one.clipped for one in stats),
        sum(one.ratio for one in stats),
        sum(one.kl for one in stats),
        sum(one.entropy for one in stats),
    )


def _means(
    num_tokens: float, clipped: float, ratio: float, kl: float, entropy: float
) -> dict[str, float]:
    tokens = num_tokens or 1
    return {
        "clip_fraction": clipped / tokens,
        "ratio/mean": ratio / tokens,
        "mismatch_kl": kl / tokens,
        "entropy": entropy / tokens,
    }
