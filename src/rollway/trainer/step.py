"""Takes one optimizer step from one batch."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..config.sections import TrainerConfig
from ..errors import GradientError, ModelError
from ..model.packing import RowModel, RowTokens
from ..payload.reader import SegmentReader
from ..records.batch import BatchManifest, LeftOutRow
from ..records.engine import fresh_kl_key
from .collective import Collective
from .loss import mismatch_kl, policy_loss, token_sums
from .master import MasterWeights
from .micro_batch import PackedMicroBatch, pack_rows
from .row_rules import RowRules, UsableRow

MEANS = ("clip_fraction", "ratio/mean", "mismatch_kl", "entropy", "ratio/limited")
"""The metrics that are means over the trained tokens, in the order of `token_sums`."""


NUM_SUMS = 3 + len(MEANS)
"""The loss, the number of tokens, a sum for each mean, and the number of tokens with known logprobs."""
NUM_SAMPLED = 1024
"""About how many numbers `sample_weights` returns."""
NOT_FINITE = "the model gives its tokens logprobs that are not finite"


class Learner:
    def __init__(
        self, rows: RowModel, config: TrainerConfig, ranks: Collective | None = None
    ) -> None:
        self.model = rows.model
        if config.activation_checkpointing:
            recompute_activations(self.model)
        self._rows = rows
        self._masters = MasterWeights(self.model, getattr(torch, config.dtype))
        self.weights = self._masters.named
        self._config = config
        self._ranks = ranks or Collective()
        self._rules = RowRules(rows, replays=config.replay_routes)
        self._by_engine: dict[str, list[float]] = {}
        """For the rows of a step that an engine drew from the version that is trained: the sum of the KL
        between trainer and engine, and the number of tokens."""
        self.left_out: list[LeftOutRow] = []
        """The rows of this rank's last step that could not be trained."""
        self.optimizer = torch.optim.AdamW(
            self.weights.values(),
            lr=config.lr,
            weight_decay=config.weight_decay,
            betas=(0.9, 0.95),
        )

    def step(self, manifest: BatchManifest, reader: SegmentReader) -> dict[str, float]:
        """Update the model with the gradients of a batch, and return the step's metrics."""
        config = self._config
        lr = config.lr * min(1.0, manifest.step / max(1, config.lr_ramp_steps))
        for param_group in self.optimizer.param_groups:
            param_group["lr"] = lr
        norm, (loss, num_tokens, *sums, num_known) = self.compute_gradients(manifest, reader)
        self._check_weights(manifest, num_tokens)
        self.optimizer.step()
        self.update_model()
        metrics = {"loss": loss, "grad_norm": norm, "lr": lr}
        for name, value in zip(MEANS, sums, strict=True):
            count = num_known if name == "mismatch_kl" else num_tokens
            if count or not num_tokens:
                metrics[name] = value / (count or 1)
        return metrics | self._engine_metrics()

    def update_model(self) -> None:
        """Make the model compute with the current weights."""
        self._masters.copy_to_model()

    def sample_weights(self) -> tuple[float, ...]:
        """Return a few numbers of every weight."""
        each = max(1, NUM_SAMPLED // len(self.weights))
        parts = [
            weight.detach().flatten()[:: max(1, weight.numel() // each)][:each]
            for weight in self.weights.values()
        ]
        return tuple(torch.cat(parts).tolist())

    def compute_gradients(
        self, manifest: BatchManifest, reader: SegmentReader
    ) -> tuple[float, list[float]]:
        """Sum the gradients over all micro-batches and ranks, and clip them. Return their norm, and the
        sums of `_backward`. Each loss is divided by the number of tokens of the whole
        batch, so that the sum over the ranks is the gradient that one rank would compute alone."""
        self.optimizer.zero_grad(set_to_none=True)
        self.left_out = []
        self._by_engine = {row.engine: [0.0, 0.0] for row in manifest.rows if row.engine}
        sums = [0.0] * NUM_SUMS
        has_routes = self._rules.expects_routes(reader, manifest.rows)
        for indices in self._ranks.share(manifest.ranks):
            planned = [manifest.rows[index] for index in indices]
            rows, unusable = self._rules.load(reader, planned, expects_routes=has_routes)
            self.left_out += unusable
            for places in self._rows.split([row.row.num_tokens for row in rows]):
                chosen = [rows[place] for place in places]
                added = self._backward(chosen, manifest.num_trainable)
                sums = [total + value for total, value in zip(sums, added, strict=True)]
        weights = self.weights.values()
        self._ranks.sum_gradients(weights)
        norm = float(torch.nn.utils.clip_grad_norm_(weights, self._config.max_grad_norm))
        sums = self._ranks.sum(sums)
        if not math.isfinite(norm):
            raise GradientError(
                f"the gradient of step {manifest.step} is not finite, so the model was not updated; "
                "lower trainer.lr, and --resume continues from the last version"
            )
        return norm, sums

    def _check_weights(self, manifest: BatchManifest, num_tokens: float) -> None:
        """Raise if the model gives no usable logprob to any row."""
        own = sum(row.reason == NOT_FINITE for row in self.left_out)
        (not_finite,) = self._ranks.sum([own])
        if not num_tokens and not_finite > 1:
            raise ModelError(
                f"the model gives no finite logprob to any row of step {manifest.step}: its weights are "
                "broken; lower trainer.lr, and start from an earlier checkpoint"
            )

    def _backward(self, rows: list[UsableRow], num_trainable: int) -> list[float]:
        """Add the gradients of one forward pass. Return its loss, the sums of `token_sums`, and for how
        many tokens the engine's logprobs are known: the others count as drawn by the trained policy. A
        row to which the model gives no finite logprobs is left out, and the rest is computed again."""
        if not rows:
            return [0.0] * NUM_SUMS
        packed, config, device = pack_rows(rows), self._config, self._rows.device
        known, advantages = packed.has_logprob.to(device), packed.advantages.to(device)
        limits = {"clip_low": config.clip_low, "clip_high": config.clip_high}
        passing = token_logprobs(self._rows, packed, replay_routes=config.replay_routes)
        with passing as (logprobs, entropy):
            is_broken = ~torch.isfinite(logprobs.detach()).cpu()
            if not is_broken.any():
                engine_logprobs = torch.where(
                    known, packed.logprobs.to(device), logprobs.detach()
                )
                losses, clipped = policy_loss(logprobs, engine_logprobs, advantages, **limits)
                loss = losses.sum() / num_trainable
                loss.backward()
                sums = token_sums(logprobs.detach(), engine_logprobs, clipped, entropy)
                kl = mismatch_kl(logprobs.detach(), engine_logprobs).cpu()
                self._add_by_engine(rows, packed, kl)
                return [float(loss.detach()), *sums, float(known.sum())]
        del logprobs, entropy  # and with them the activations of this pass
        broken = set(packed.row_of_target[is_broken].tolist())
        self.left_out += [rows[place].left_out(NOT_FINITE) for place in sorted(broken)]
        whole = [row for place, row in enumerate(rows) if place not in broken]
        return self._backward(whole, num_trainable)

    def _add_by_engine(
        self, rows: list[UsableRow], packed: PackedMicroBatch, kl: Tensor
    ) -> None:
        for place, usable in enumerate(rows):
            if usable.row.engine:
                of_row = kl[packed.row_of_target == place]
                total = self._by_engine[usable.row.engine]
                total[0] += float(of_row.sum())
                total[1] += len(of_row)

    def _engine_metrics(self) -> dict[str, float]:
        """Return the KL of each engine, over all ranks."""
        engines = sorted(self._by_engine)
        flat = [value for engine in engines for value in self._by_engine[engine]]
        sums = iter(self._ranks.sum(flat) if flat else [])
        return {
            fresh_kl_key(engine): total / count
            for engine, total, count in zip(engines, sums, sums, strict=True)
            if count
        }


def recompute_activations(model: Any) -> None:
    """Make a model forget the activations inside its layers, and compute them again when needed."""
    if not model.supports_gradient_checkpointing:
        raise ModelError(
            f"models of family '{model.config.model_type}' cannot recompute their activations: set "
            "trainer.activation_checkpointing = false"
        )
    model.gradient_checkpointing_enable({"use_reentrant": False})


@contextmanager
def token_logprobs(
    model: RowModel, packed: PackedMicroBatch, *, replay_routes: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """Give the block the logprob of each trained token, at the temperature it was drawn with, and the
    entropy of the distribution it was drawn from. Their backward pass has to run in the block."""
    routes = packed.routes if replay_routes else None
    tokens = RowTokens(packed.token_ids, packed.lengths, packed.targets - 1, routes)
    with model.logits(tokens) as logits:
        logits = logits.float() / packed.temperatures[:, None].to(model.device)
        all_logprobs = torch.log_softmax(logits, dim=-1)
        drawn = packed.token_ids[packed.targets].to(model.device)
        with torch.no_grad():
            entropy = -(all_logprobs.exp() * all_logprobs).sum(-1)
        yield all_logprobs.gather(-1, drawn[:, None])[:, 0], entropy
