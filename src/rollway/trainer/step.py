"""One optimizer step from one manifest."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ..config.sections import TrainerConfig
from ..errors import ModelError
from ..model.routers import find_routers, replay
from ..payload.reader import SegmentReader
from ..records.batch import BatchManifest
from .collective import Collective
from .loss import TokenStats, policy_loss, token_stats
from .micro_batch import PackedMicroBatch, load_micro_batch


class Learner:
    """A model and its optimizer."""

    def __init__(self, model: Any, config: TrainerConfig, ranks: Collective | None = None) -> None:
        self.model = model.train()
        self._config = config
        self._ranks = ranks or Collective()
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


def _replayed(model: Any, packed: PackedMicroBatch) -> AbstractContextManager[None]:
    if packed.routes is None:
        return nullcontext()
    routers = find_routers(model)
    if len(routers) != packed.routes.shape[1]:
        raise ModelError(
            f"the engine reports routes of {packed.routes.shape[1]} layers, the model has "
            f"{len(routers)} routers; set trainer.replay_routes=false to train without"
        )
    return replay(routers, packed.routes.to(model.device))


def token_logprobs(
    model: Any, packed: PackedMicroBatch, *, replay_routes: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprob of each trained token, at the temperature it was drawn with, and the entropy there."""
    device = model.device
    same_row = packed.segments[:, None] == packed.segments[None, :]
    mask = same_row & (packed.positions[:, None] >= packed.positions[None, :])
    with _replayed(model, packed) if replay_routes else nullcontext():
        output = model(
            input_ids=packed.token_ids[None].to(device),
            position_ids=packed.positions[None].to(device),
            attention_mask=mask[None, None].to(device),
            logits_to_keep=(packed.targets - 1).to(device),
            use_cache=False,
        )
    logits = output.logits[0].float() / packed.temperatures[:, None].to(device)
    all_logprobs = torch.log_softmax(logits, dim=-1)
    drawn = packed.token_ids[packed.targets].to(device)
    with torch.no_grad():
        entropy = -(all_logprobs.exp() * all_logprobs).sum(-1)
    return all_logprobs.gather(-1, drawn[:, None])[:, 0], entropy
