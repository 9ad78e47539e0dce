"""The columns of a reply: token ids, logprobs and versions, one entry per drawn token."""

from typing import Any

import numpy as np
import safetensors.numpy
from msgspec import Struct
from numpy.typing import NDArray

from ...errors import EngineError, PayloadError, ReplyAborted
from ...payload.blob import parse
from ...records.turn import Floats, Ints, Routes
from .body import BodyBuffer


class ReplyColumns(Struct, frozen=True):
    """Columns with one entry per drawn token. `versions` is None if the engine does not report them."""

    token_ids: Ints
    logprobs: Floats
    versions: Ints | None
    finish_reason: str


def make_columns(
    token_ids: list[int] | None,
    logprobs: list[float] | None,
    versions: list[int] | None,
    finish_reason: str | None,
) -> ReplyColumns:
    """Return the columns, or raise EngineError for values that a policy cannot have drawn."""
    if token_ids is None or logprobs is None:
        missing = "token_ids" if token_ids is None else "logprobs"
        raise EngineError(
            f"the engine's reply has no {missing}; it must honour return_token_ids"
        )
    if not token_ids:
        raise ReplyAborted("the engine's reply has no tokens")
    for name, column in (("logprobs", logprobs), ("versions", versions)):
        if column is not None and len(column) != len(token_ids):
            counts = f"{len(token_ids)} tokens and {len(column)} {name}"
            raise EngineError(f"the engine's reply has {counts}; these numbers must be equal")
    values = np.array(logprobs, np.float32)
    if not np.isfinite(values).all():
        raise EngineError("the engine's reply has logprobs that are not finite")
    try:
        ids = np.array(token_ids, np.int32)
        numbers = None if versions is None else np.array(versions, np.int32)
    except OverflowError as error:
        raise EngineError(
            f"the engine's reply has numbers that do not fit int32: {error}"
        ) from None
    return ReplyColumns(ids, values, numbers, finish_reason or "abort")


SAFETENSORS = "application/vnd.safetensors"


def encode_reply(
    token_ids: list[int],
    logprobs: list[float],
    versions: list[int],
    finish_reason: str,
    routes: Routes | None,
) -> bytes:
    """Encode a binary reply, for clients that accept SAFETENSORS."""
    tensors: dict[str, NDArray[Any]] = {
        "token_ids": np.array(token_ids, np.int32),
        "logprobs": np.array(logprobs, np.float32),
        "versions": np.array(versions, np.int32),
        "finish_reason": np.frombuffer(finish_reason.encode(), np.uint8),
    }
    if routes is not None:
        tensors["routes"] = np.ascontiguousarray(routes)
    return safetensors.numpy.save(tensors)


def decode_reply(buffer: BodyBuffer) -> tuple[ReplyColumns, Routes | None]:
    """Copy columns and routes out of a binary reply, because the next reply overwrites the buffer.
    Copying the routes, which are large, releases the GIL."""
    try:
        tensors = parse(buffer.view(0, buffer.length))
        names = ("token_ids", "logprobs", "versions")
        token_ids, logprobs, versions = (tensors[name].tolist() for name in names)
        finish_reason = bytes(tensors["finish_reason"]).decode()
        drawn = make_columns(token_ids, logprobs, versions, finish_reason)
    except (PayloadError, KeyError, UnicodeDecodeError) as error:
        raise EngineError(f"the engine's binary reply cannot be read: {error}") from None
    routes = tensors.get("routes")
    if routes is None:
        return drawn, None
    copy = np.empty_like(routes)
    np.copyto(copy, routes)
    return drawn, copy
