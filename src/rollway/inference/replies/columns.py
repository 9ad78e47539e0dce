"""What a reply says beside routes, as columns."""

from typing import Any

import numpy as np
import safetensors.numpy
from msgspec import Struct
from numpy.typing import NDArray

from ...errors import EngineError, PayloadError
from ...payload.blob import parse
from ...records.turn import Floats, Ints, Routes
from .body import BodyBuffer


class ReplyColumns(Struct, frozen=True):
    """One entry per token drawn. `versions` is None where the engine does not say which weights drew."""

    token_ids: Ints
    logprobs: Floats
    versions: Ints | None
    finish_reason: str


def columns(
    token_ids: list[int] | None, logprobs: list[float] | None, versions: list[int] | None,
    finish_reason: str | None,
) -> ReplyColumns:  # fmt: skip
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
    return ReplyColumns(ids, values, drawn_by, finish_reason or "abort")


SAFETENSORS = "application/vnd.safetensors"


def encode_reply(
    token_ids: list[int], logprobs: list[float], versions: list[int], finish_reason: str,
    routes: Routes | None,
) -> bytes:  # fmt: skip
    tensors: dict[str, NDArray[Any]] = {
        "token_ids": np.array(token_ids, np.int32),
        "logprobs": np.array(logprobs, np.float32),
        "versions": np.array(versions, np.int32),
        "finish_reason": np.frombuffer(finish_reason.encode(), np.uint8),
    }
    if routes is not None:
        tensors["routes"] = np.ascontiguousarray(routes)
    return safetensors.numpy.save(tensors)


def decode_reply(spool: BodyBuffer) -> tuple[ReplyColumns, Routes | None]:
    """Copies of the columns: the spool is the next reply's. The large copy releases the GIL."""
    try:
        found = parse(spool.view(0, spool.length))
        drawn = columns(
            found["token_ids"].tolist(),
            found["logprobs"].tolist(),
            found["versions"].tolist(),
            bytes(found["finish_reason"]).decode(),
        )
    except (PayloadError, KeyError, UnicodeDecodeError) as error:
        raise EngineError(f"the engine's binary reply cannot be read: {error}") from None
    routes = found.get("routes")
    if routes is None:
        return drawn, None
    copy = np.empty_like(routes)
    np.copyto(copy, routes)
    return drawn, copy
