"""Holds an engine's replies against the model: what it cannot have drawn is refused before it trains."""

import math
import random

from msgspec import Struct

from ...errors import EngineError
from ...model.shape import ModelShape, find_repeats
from ...records.turn import MINUS_INFINITY, Routes
from .columns import ReplyColumns

FINISH_REASONS = ("stop", "length")
"""How a complete reply ends. A reply that was aborted is only a part of what the policy would say."""
ROUNDING = 1e-4
"""A log-probability may be above 0 by an error of rounding."""
MAX_VERSIONS_AHEAD = 2
"""An engine may have a newer version than this worker was told of, because it loads it first."""
MAX_SAMPLE_BYTES = 32 << 10
"""Of more routes than this, only some tokens are checked for an expert that was chosen twice. This takes
a tenth of a millisecond, on the loop. The trainer checks all tokens."""


class ReplyRules(Struct, frozen=True):
    """What a reply must be like. Without a shape only what holds for every model is checked."""

    wants_routes: bool
    shape: ModelShape | None = None
    knows_versions: bool = False
    """Whether the versions of the policy come from a run, which tells this worker of each."""

    def check_columns(self, drawn: ReplyColumns, version: int) -> None:
        """Raise EngineError for tokens that the policy cannot have drawn. `version` is the newest that
        this worker knows of."""
        if drawn.finish_reason not in FINISH_REASONS:
            raise EngineError(
                f"the engine ended its reply with finish_reason '{drawn.finish_reason}', not with "
                f"{' or '.join(FINISH_REASONS)}: it is not whole"
            )
        vocab_size = self.shape.vocab_size if self.shape else 0
        lowest, highest = int(drawn.token_ids.min()), int(drawn.token_ids.max())
        if lowest < 0 or (vocab_size and highest >= vocab_size):
            raise EngineError(
                f"the engine's reply has token ids from {lowest} to {highest}, but the vocabulary of "
                f"'model.path' has {vocab_size} tokens: does the engine serve this model?"
            )
        _check_logprobs(drawn)
        if drawn.versions is None:
            return
        oldest, newest = int(drawn.versions.min()), int(drawn.versions.max())
        limit = version + MAX_VERSIONS_AHEAD if self.knows_versions else newest
        if oldest < 0 or newest > limit:
            raise EngineError(
                f"the engine says that versions {oldest} to {newest} drew its reply, but the versions "
                f"so far are 0 to {version}"
            )

    def check_routes(self, routes: Routes, highest: int) -> None:
        """Raise EngineError for experts that the model's routers cannot have chosen. `highest` is the
        largest of them."""
        shape = self.shape
        if shape is None or not shape.has_experts:
            return
        _, num_layers, topk = routes.shape
        sent = f"the engine's routes have {num_layers} layers × {topk} experts"
        if topk != shape.topk or not shape.may_have_routes_of(num_layers):
            known = {shape.num_layers, len(shape.moe_layers or ())} - {0}
            wanted = " or ".join(str(count) for count in sorted(known))
            raise EngineError(
                f"{sent}, but the model in 'model.path' ({shape.family}) has {wanted} × {shape.topk}"
            )
        if highest >= shape.num_experts:
            raise EngineError(
                f"the engine's routes name expert {highest}, but the model in 'model.path' has "
                f"{shape.num_experts}"
            )
        if topk > 1:
            every = math.ceil(routes.nbytes / MAX_SAMPLE_BYTES) or 1
            self._check_distinct(routes[random.randrange(every) :: every], shape)

    def _check_distinct(self, routes: Routes, shape: ModelShape) -> None:
        is_repeated = find_repeats(routes)
        if not is_repeated.any():
            return
        if not routes.any():
            raise EngineError(
                "the engine's routes are all zero: it does not record them (vLLM on CPU needs "
                "--enforce-eager)"
            )
        num_layers, moe_layers = routes.shape[1], shape.moe_layers
        if moe_layers is None:
            # layers without experts may be among them, with zeros for every token
            is_repeated = is_repeated[:, routes.any(axis=(0, 2))]
        elif num_layers == shape.num_layers:
            is_repeated = is_repeated[:, list(moe_layers)]
        if num_wrong := int(is_repeated.any(axis=1).sum()):
            raise EngineError(
                f"the engine's routes send {num_wrong} of {len(routes)} tokens to one expert twice"
            )


def _check_logprobs(drawn: ReplyColumns) -> None:
    lowest, highest = float(drawn.logprobs.min()), float(drawn.logprobs.max())
    if highest > ROUNDING:
        raise EngineError(
            f"the engine's reply has a logprob of {highest:g}: a logprob is at most 0"
        )
    if lowest <= MINUS_INFINITY:
        raise EngineError(
            f"the engine's reply has a logprob of {lowest:g}, which stands for minus infinity: the "
            "policy cannot have drawn this token"
        )
