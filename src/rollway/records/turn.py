"""A turn: one engine call inside a rollout, as columns."""

from typing import Annotated, Any

import numpy as np
from msgspec import Meta, Struct, field
from numpy.typing import NDArray

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
Routes = NDArray[Any]
"""Expert ids `[tokens, layers, topk]`, uint8 or uint16."""


class Sampling(Struct, frozen=True):
    """How the engine draws a reply."""

    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    temperature: Annotated[float, Meta(ge=0, le=1_000)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0


class Turn(Struct, frozen=True):
    """What the engine was given and what it drew.

    `routes` covers positions `routes_start .. len(prompt_ids) + len(completion_ids) - 2`: the last
    token was never processed by the engine, so it has no route yet. `extra` holds further columns, one
    value for each token of the completion, such as `ref_logprobs` and `token_weights`.
    """

    prompt_ids: Ints
    completion_ids: Ints
    logprobs: Floats
    versions: Ints
    temperature: float
    finish_reason: str
    routes: Routes | None = None
    routes_start: int = 0
    extra: dict[str, Floats] = field(default_factory=dict)
