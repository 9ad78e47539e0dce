"""What a reply says beside routes, as columns."""

import numpy as np
from msgspec import Struct

from ..errors import EngineError
from ..records.turn import Floats, Ints


class Columns(Struct, frozen=True):
    """One entry per token drawn. `versions` is None where the engine does not say which weights drew."""

    token_ids: Ints
    logprobs: Floats
    versions: Ints | None
    finish_reason: str


def columns(
    token_ids: list[int] | None, logprobs: list[float] | None, versions: list[int] | None,
    finish_reason: str | None,
) -> Columns:  # fmt: skip
    """Refuses what no policy can have drawn."""
    if token_ids is None or logprobs is None:
        missing = "token_ids" if token_ids is None else "logprobs"
        raise EngineError(f"the engine's reply has no {missing}; it must honour return_token_ids")
    if not token_ids:
        raise EngineError("the engine's reply has no tokens")
    values = np.array(logprobs, np.float32)
    if not np.isfinite(values).all():
        raise EngineError("the engine's reply has logprobs that are not finite")
    try:
        ids = np.array(token_ids, np.int32)
        drawn_by = None if versions is None else np.array(versions, np.int32)
    except OverflowError as error:
        raise EngineError(f"the engine's reply has ids that no vocabulary has: {error}") from None
    return Columns(ids, values, drawn_by, finish_reason or "abort")
