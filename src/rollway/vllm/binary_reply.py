"""A completion as a safetensors file: its columns and routes as raw bytes, not as text inside JSON."""

import io
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pybase64
import safetensors.numpy
from msgspec import Struct
from numpy.lib import format as npy
from numpy.typing import NDArray

SAFETENSORS = "application/vnd.safetensors"
MAX_HEADER_BYTES = 512
"""The header of a .npy file of routes has 128 bytes."""


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


class _Logprobs(Struct, frozen=True):
    token_logprobs: list[float]


class _Choice(Struct, frozen=True):
    token_ids: list[int]
    logprobs: _Logprobs
    finish_reason: str
    routed_experts: msgspec.Raw = msgspec.Raw(b"null")


class _Completion(Struct, frozen=True):
    id: str
    choices: tuple[_Choice]
    prompt_routed_experts: None = None


_completions = msgspec.json.Decoder(_Completion)


def convert(
    body: bytes | bytearray, versions_of: Callable[[int], NDArray[Any] | None]
) -> bytes | None:
    """Return vLLM's JSON of one completion as a safetensors file, with the versions that `versions_of`
    returns for the number of its tokens. None if that is not possible: it has several choices, lacks a
    column, or keeps its routes in two places."""
    try:
        (choice,) = _completions.decode(body).choices
        routes = _decode_npy(memoryview(choice.routed_experts))
        logprobs = choice.logprobs.token_logprobs
        ids, versions = choice.token_ids, versions_of(len(choice.token_ids))
        return encode_reply(ids, logprobs, versions, choice.finish_reason, routes)
    except (msgspec.DecodeError, ValueError, OverflowError):
        return None  # the client reads the JSON, and says what is wrong with it


def _decode_npy(text: memoryview) -> NDArray[Any] | None:
    """Decode the base64 of a .npy file, which is a string of JSON, or null."""
    if bytes(text[:4]) == b"null":
        return None
    raw = pybase64.b64decode_as_bytearray(text[1:-1], validate=True)
    file = io.BytesIO(raw[:MAX_HEADER_BYTES])
    npy.read_magic(file)
    shape, _, dtype = npy.read_array_header_1_0(file)
    return np.frombuffer(raw, dtype, offset=file.tell()).reshape(shape)
