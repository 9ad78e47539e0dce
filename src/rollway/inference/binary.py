"""A reply as one safetensors file: columns as they are, no base64 and no JSON numbers.

The embedded engine answers so when a request accepts it; a client that does not know it gets JSON.
"""

from typing import Any

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

from ..errors import EngineError, PayloadError
from ..payload.blob import parse
from ..records.turn import Routes
from .body import Spool
from .columns import Columns, columns

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


def decode_reply(spool: Spool) -> tuple[Columns, Routes | None]:
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
