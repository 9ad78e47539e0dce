"""A completion as a safetensors file: its columns and routes as raw bytes, not as text inside JSON."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

SAFETENSORS = "application/vnd.safetensors"


def encode_reply(
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    versions: Sequence[int] | NDArray[Any] | None,
    finish_reason: str,
    routes: NDArray[Any] | None,
) -> bytes:
    """Encode a reply for clients that accept SAFETENSORS. `versions` has one entry per token."""
    tensors: dict[str, NDArray[Any]] = {
        "token_ids": np.array(token_ids, np.int32),
        "logprobs": np.array(logprobs, np.float32),
        "finish_reason": np.frombuffer(finish_reason.encode(), np.uint8),
    }
    if versions is not None:
        tensors["versions"] = np.asarray(versions, np.int32)
    if routes is not None:
        tensors["routes"] = np.ascontiguousarray(routes)
    return safetensors.numpy.save(tensors)
