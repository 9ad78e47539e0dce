"""Takes one optimizer step from one batch."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ..config.sections import TrainerConfig
from ..errors import ModelError
from ..model.routers import find_routers, replay
from ..payload.reader import SegmentReader
from ..records.batch import BatchManifest, BatchRow
from .collective import Collective
from .loss import policy_loss, token_sums
from .micro_batch import PackedMicroBatch, load_micro_batch

MEANS = ("clip_fraction", "ratio/mean", "mismatch_kl", "entropy")
"""The metrics that are means over the trained tokens, in the order of `token_sums`."""


class Learner:
    def __init__(
        self, model: Any, config: TrainerConfig, ranks: Collective | None = None
    ) -> None:
        self.model = model.train()
        self._config = config
        self._ranks = ranks or Collective()
        self.optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=config.lr,
            weight_decay=config.weight_decay,
            betas=(0.9, 0.95),
        )

    def step(self, manifest: BatchManifest, reader: SegmentReader) -> dict[str, float]:
        """Sum the gradients over all micro-batches and ranks, update the model, and return the step's
        metrics. Each loss is divided by the number of tokens of the whole batch, so that the sum over
        the ranks is the gradient that one rank would have computed alone."""
        config, model = self._config, self.model
        lr = config.lr * min(1.0, manifest.step / max(1, config.lr_ramp_steps))
        for param_group in self.optimizer.param_groups:
            param_group["lr"] = lr
        self.optimizer.zero_grad(set_to_none=True)
        sums = [0.0] * 6
        for indices in self._ranks.share(manifest.ranks):
            rows = [manifest.rows[index] for index in indices]
            added = self._backward(reader, rows, manifest.num_trainable)
            sums = [total + value for total, value in zip(sums, added, strict=True)]
        self._ranks.sum_gradients(model.parameters())
        loss, num_tokens, *sums = self._ranks.sum(sums)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        if not torch.isfinite(norm):
            raise ModelError(
                f"the gradient of step {manifest.step} is not finite, so the model was not updated; "
                "lower trainer.lr, and --resume continues from the last version"
            )
        self.optimizer.step()
        metrics = {"loss": loss, "grad_norm": float(norm), "lr": lr}
        for name, value in zip(MEANS, sums, strict=True):
            metrics[name] = value / (num_tokens or 1)
        return metrics

    def _backward(
        self, reader: SegmentReader, rows: list[BatchRow], num_trainable: int
    ) -> list[float]:
        """Add the gradients of one micro-batch. Return its loss and the sums of `token_sums`."""
        packed, config, device = (
            load_micro_batch(reader, rows),
            self._config,
            self.model.device,
        )
        logprobs, entropy = token_logprobs(
            self.model, packed, replay_routes=config.replay_routes
        )
        engine_logprobs, advantages = packed.logprobs.to(device), packed.advantages.to(device)
        limits = {"clip_low": config.clip_low, "clip_high": config.clip_high}
        losses, clipped = policy_loss(logprobs, engine_logprobs, advantages, **limits)
        loss = losses.sum() / num_trainable
        loss.backward()
        sums = token_sums(logprobs.detach(), engine_logprobs, clipped, entropy)
        return [float(loss.detach()), *sums]


def _replay(model: Any, routes: Tensor | None) -> AbstractContextManager[None]:
    """Make the model's routers choose the experts that the engine chose, while the block lasts."""
    if routes is None:
        return nullcontext()
    routers, num_layers = find_routers(model), routes.shape[1]
    if len(routers) != num_layers:
        raise ModelError(
            f"the engine returns routes of {num_layers} layers, but the model has {len(routers)} "
            "routers; set trainer.replay_routes = false to train without them"
        )
    return replay(routers, routes.to(model.device))


def token_logprobs(
    model: Any, packed: PackedMicroBatch, *, replay_routes: bool
) -> tuple[Tensor, Tensor]:
    """Return the logprob of each trained token, at the temperature it was drawn with, and the entropy of
    the distribution it was drawn from."""
    device = model.device
    rows, positions = packed.row_of_token, packed.positions
    mask = (rows[:, None] == rows) & (positions[:, None] >= positions)
    with _replay(model, packed.routes if replay_routes else None):
        output = model(
            input_ids=packed.token_ids[None].to(device),
            position_ids=positions[None].to(device),
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
