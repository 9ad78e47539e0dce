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


class Learner:
    """A model and its optimizer."""

    def __init__(self, model: Any, config: TrainerConfig) -> None:
        self.model = model.train()
        self._config = config
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=config.lr, weight_decay=config.weight_decay, betas=(0.9, 0.95)
        )

    def step(self, manifest: BatchManifest, reader: SegmentReader) -> dict[str, float]:
        """Gradients of every micro-batch, one update; the step's metrics."""
        lr = self._config.lr * min(1.0, manifest.step / max(1, self._config.lr_ramp_steps))
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.zero_grad(set_to_none=True)
        total, stats = 0.0, []
        for indices in manifest.micro_batches:
            rows = [manifest.rows[index] for index in indices]
            loss, seen = self._backward(reader, rows, manifest.num_trainable)
            total += loss
            stats.append(seen)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._config.max_grad_norm)
        if not torch.isfinite(norm):
            raise ModelError(f"the gradient of step {manifest.step} is not finite; nothing was updated")
        self.optimizer.step()
        return {"loss": total, "grad_norm": float(norm), "lr": lr, **_means(stats)}

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


def _means(stats: list[TokenStats]) -> dict[str, float]:
    tokens = sum(one.num_tokens for one in stats) or 1
    return {
        "clip_fraction": sum(one.clipped for one in stats) / tokens,
        "ratio/mean": sum(one.ratio for one in stats) / tokens,
        "mismatch_kl": sum(one.kl for one in stats) / tokens,
        "entropy": sum(one.entropy for one in stats) / tokens,
    }
