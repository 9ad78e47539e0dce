"""Holds an engine's replies against the model: what it cannot have drawn is refused before it trains."""

import math
import random

import numpy as np
from msgspec import Struct

from ...errors import EngineError, ReplyAborted
from ...model.shape import ModelShape
from ...records.turn import MINUS_INFINITY, Floats, Ints, Routes
from .columns import ReplyColumns

FINISH_REASONS = ("stop", "length")
"""How a complete reply ends. A reply that was aborted is only a part of what the policy would say."""
ROUNDING = 1e-4
"""A log-probability may be above 0 by an error of rounding."""
MAX_VERSIONS_AHEAD = 2
"""An engine may have a newer version than this worker was told of, because it loads it first."""
TOKEN_BYTES, SLOT_BYTES, SLACK_BYTES = 2_000, 16, 1 << 20
"""More than any engine sends for a token (ids, text and logprobs as JSON) and for the choice of one
expert (base64 of ids and weights)."""
UNKNOWN_BYTES = 1 << 30
MAX_SAMPLE_BYTES = 8 << 10
"""Of more routes than this, only some tokens are checked for an expert that was chosen twice: the loop
waits meanwhile. The trainer checks all tokens."""


class ReplyRules(Struct, frozen=True):
    """What a reply must be like. Without a shape only what holds for every model is checked."""

    wants_routes: bool
    shape: ModelShape | None = None
    knows_versions: bool = False
    """Whether the versions of the policy come from a run, which tells this worker of each."""

    def most_bytes(self, num_tokens: int) -> int:
        """Return how large the reply to a request may be whose prompt and reply have this many tokens
        together. Without the model's sizes, that is what a worker has memory for."""
        shape = self.shape
        if shape is None or not shape.num_layers:
            return UNKNOWN_BYTES
        slots = shape.num_layers * shape.topk if self.wants_routes else 0
        return SLACK_BYTES + num_tokens * (TOKEN_BYTES + slots * SLOT_BYTES)

    def check_columns(self, drawn: ReplyColumns, version: int) -> None:
        """Raise EngineError for tokens that the policy cannot have drawn. `version` is the newest that
        this worker knows of."""
        if drawn.finish_reason not in FINISH_REASONS:
            raise ReplyAborted(
                f"the engine ended its reply with finish_reason '{drawn.finish_reason}', not with "
                f"{' or '.join(FINISH_REASONS)}: it is not whole"
            )
        vocab_size = self.shape.vocab_size if self.shape else 0
        lowest, highest = _range(drawn.token_ids)
        if lowest < 0 or (vocab_size and highest >= vocab_size):
            raise EngineError(
                f"the engine's reply has token ids from {lowest} to {highest}, but the vocabulary of "
                f"'model.path' has {vocab_size} tokens: does the engine serve this model?"
            )
        _check_logprobs(drawn)
        if drawn.versions is None:
            return
        oldest, newest = _range(drawn.versions)
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
        every = math.ceil(routes.nbytes / MAX_SAMPLE_BYTES) or 1
        sample = routes[random.randrange(every) :: every]
        if why := shape.why_not(sample, highest):
            raise EngineError(f"the engine's routes {why} (model.path)")
        if num_wrong := shape.count_repeats(sample):
            raise EngineError(
                f"the engine's routes send {num_wrong} of {len(sample)} tokens to one expert twice"
            )


def _range(column: Ints | Floats) -> tuple[float, float]:
    """Return the smallest and the largest value. The methods of arrays take twice the time of ufuncs,
    which counts for short columns."""
    return np.minimum.reduce(column).item(), np.maximum.reduce(column).item()


def _check_logprobs(drawn: ReplyColumns) -> None:
    lowest, highest = _range(drawn.logprobs)
    if highest > ROUNDING:
        raise EngineError(
            f"the engine's reply has a logprob of {highest:g}: a logprob is at most 0"
        )
    if lowest <= MINUS_INFINITY:
        raise EngineError(
            f"the engine's reply has a logprob of {lowest:g}, which stands for minus infinity: the "
            "policy cannot have drawn this token"
        )
