"""A turn: one engine call inside a rollout, as columns."""

import math
from typing import Annotated, Any

import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
Routes = NDArray[Any]
"""Expert ids `[tokens, layers, topk]`, uint8 or uint16."""


class SpooledRoutes(Struct, frozen=True):
    """Routes that a file holds, from byte `start` of its data on. Only this record is in memory."""

    start: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


MINUS_INFINITY = -9998.0
"""A logprob up to this is none: vLLM writes -9999 for minus infinity, which JSON does not know."""


class Sampling(Struct, frozen=True):
    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    temperature: Annotated[float, Meta(ge=0, le=1_000)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0


class Turn(Struct, frozen=True):
    """The prompt the engine was given and the completion it sampled. `routes` covers positions
    `routes_start .. len(prompt_ids) + len(completion_ids) - 2`: the engine never processed the last
    token, so that token has no route yet."""

    prompt_ids: Ints
    completion_ids: Ints
    logprobs: Floats
    versions: Ints
    temperature: float
    finish_reason: str
    routes: Routes | None = None
    routes_start: int = 0
    engine: str = ""
    """The address of the engine that drew it."""
    is_approximate: bool = False
    """No token ids or no logprobs were given: the ids are made from its text, all logprobs are 0."""
