"""The columns of a reply: token ids, logprobs and versions, one entry per drawn token."""

import math

import numpy as np
from msgspec import Struct

from ...errors import EngineError, PayloadError, ReplyAborted
from ...payload.blob import parse
from ...records.turn import Floats, Ints, Routes
from .body import BodyBuffer, bad_routes
from .routes import WantedRoutes, narrow


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
    if not math.isfinite(sum(logprobs)):
        raise EngineError("the engine's reply has logprobs that are not finite")
    values = np.array(logprobs, np.float32)
    try:
        ids = np.array(token_ids, np.int32)
        numbers = None if versions is None else np.array(versions, np.int32)
    except OverflowError as error:
        raise EngineError(
            f"the engine's reply has numbers that do not fit int32: {error}"
        ) from None
    return ReplyColumns(ids, values, numbers, finish_reason or "abort")


def decode_reply(
    buffer: BodyBuffer, wanted: WantedRoutes | None
) -> tuple[ReplyColumns, Routes | None]:
    """Copy columns and routes out of a binary reply, because the next reply overwrites the buffer.
    Copying the routes, which are large, releases the GIL. None as `wanted` leaves them out."""
    try:
        tensors = parse(buffer.view(0, buffer.length))
        token_ids, logprobs = (tensors[name].tolist() for name in ("token_ids", "logprobs"))
        versions = tensors["versions"].tolist() if "versions" in tensors else None
        finish_reason = bytes(tensors["finish_reason"]).decode()
        drawn = make_columns(token_ids, logprobs, versions, finish_reason)
    except (PayloadError, KeyError, UnicodeDecodeError) as error:
        raise EngineError(f"the engine's binary reply cannot be read: {error}") from None
    routes = tensors.get("routes")
    if routes is None or wanted is None:
        return drawn, None
    num_positions = wanted.num_positions(len(token_ids))
    num_new = num_positions - wanted.start
    if routes.ndim != 3 or len(routes) not in (num_positions, num_new):
        raise bad_routes(
            f"the engine sent {routes.dtype}{list(routes.shape)}; expected {num_positions} "
            f"positions, or {num_new} from {wanted.start} on"
        )
    new = routes[len(routes) - num_new :]
    copy = np.empty_like(new)
    np.copyto(copy, new)
    return drawn, narrow(copy)
