"""vLLM's dialect of `/v1/completions` with token-id prompts: requests out, turns in. Pure.

A request asks for ids, logprobs and, by `routed_experts_prompt_start`, for the routes of new
positions only. A reply carries routes as base64 of a .npy file in `choices[0].routed_experts`.
"""

import io
import math
from typing import Annotated

import msgspec
import numpy as np
import pybase64
from msgspec import Meta, Struct

from ..errors import EngineError
from ..records.turn import Floats, Ints, Routes, Sampling, Turn

MAX_NPY_HEADER = 1024


class CompletionRequest(Struct, frozen=True):
    """The fields of `/v1/completions` that rollway sends and its embedded engine understands.

    All are always sent: what a request leaves out, vLLM takes from the model's generation config,
    and samples from another distribution than the trainer assumes.
    """

    model: str
    prompt: list[int]
    max_tokens: Annotated[int, Meta(ge=1)] = 16
    temperature: Annotated[float, Meta(ge=0)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    logprobs: Annotated[int, Meta(ge=0)] | None = None
    return_token_ids: bool = False
    routed_experts_prompt_start: Annotated[int, Meta(ge=0)] | None = None
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    seed: Annotated[int, Meta(ge=0)] | None = None


class _Logprobs(Struct, frozen=True):
    token_logprobs: list[float]


class _Choice(Struct, frozen=True):
    finish_reason: str | None
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    token_versions: list[int] | None = None


class _Reply(Struct, frozen=True):
    choices: Annotated[list[_Choice], Meta(min_length=1)]


class _Problem(Struct, frozen=True):
    message: str


class _ErrorReply(Struct, frozen=True):
    error: _Problem


_replies = msgspec.json.Decoder(_Reply)
_errors = msgspec.json.Decoder(_ErrorReply)


def request(
    model: str, prompt_ids: Ints, sampling: Sampling, stop_ids: list[int], routes_start: int | None
) -> bytes:
    """A request's body; `routes_start` None asks for no routes."""
    return msgspec.json.encode(
        CompletionRequest(
            model=model,
            prompt=prompt_ids.tolist(),
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            logprobs=0,
            return_token_ids=True,
            routed_experts_prompt_start=routes_start,
            stop_token_ids=stop_ids,
        )
    )


def turn_from_reply(
    body: bytes | bytearray,
    routes: Routes | None,
    prompt_ids: Ints,
    sampling: Sampling,
    version: int,
    routes_start: int | None,
) -> Turn:
    """A reply as a turn: its JSON without the routes, and the routes, decoded.

    `version` is what sampled it where the engine does not say.
    """
    try:
        choice = _replies.decode(body).choices[0]
    except msgspec.MsgspecError as error:
        raise EngineError(f"the engine's reply is not a completion: {error}") from None
    if choice.token_ids is None or choice.logprobs is None:
        missing = "token_ids" if choice.token_ids is None else "logprobs"
        raise EngineError(f"the engine's reply has no {missing}; it must honour return_token_ids")
    if not choice.token_ids:
        raise EngineError("the engine's reply has no tokens")
    versions = choice.token_versions or [version] * len(choice.token_ids)
    start = 0
    if routes_start is not None:
        start = _start(routes, len(prompt_ids) + len(choice.token_ids) - 1, routes_start)
    return Turn(
        prompt_ids=prompt_ids,
        completion_ids=np.array(choice.token_ids, np.int32),
        logprobs=_finite(choice.logprobs.token_logprobs),
        versions=np.array(versions, np.int32),
        temperature=sampling.temperature,
        finish_reason=choice.finish_reason or "abort",
        routes=None if routes_start is None else routes,
        routes_start=start,
    )


def _finite(values: list[float]) -> Floats:
    logprobs = np.array(values, np.float32)
    if not np.isfinite(logprobs).all():
        raise EngineError("the engine's reply has logprobs that are not finite")
    return logprobs


def _start(routes: Routes | None, all_positions: int, asked_start: int) -> int:
    """The position routes start at: where asked, or 0 if the engine sent them all."""
    if routes is None:
        raise EngineError(
            "the engine's reply has no routes: start it with --enable-return-routed-experts, or set "
            "engine.routes=false for a model without experts"
        )
    return 0 if len(routes) == all_positions else asked_start


def decode_routes(text: bytes | bytearray) -> Routes:
    """Base64 of a .npy file of uint8 or uint16 `[tokens, layers, topk]`, as a view of its bytes.

    Decoding releases the GIL, so this may run in the thread lane.
    """
    try:
        raw = pybase64.b64decode_as_bytearray(text, validate=True)
        header = io.BytesIO(raw[:MAX_NPY_HEADER])
        if np.lib.format.read_magic(header) != (1, 0):
            raise ValueError("not version 1.0 of the .npy format")
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(header)
        if len(shape) != 3 or fortran or dtype not in (np.uint8, np.uint16):
            raise ValueError(f"{dtype}{list(shape)} is not uint8 or uint16 [tokens, layers, topk]")
        if len(raw) - header.tell() != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{len(raw) - header.tell()} bytes for {dtype}{list(shape)}")
        routes: Routes = np.frombuffer(raw, dtype, offset=header.tell()).reshape(shape)
    except (ValueError, EOFError) as error:
        raise EngineError(f"the engine's routes cannot be read: {error}") from None
    return routes


def encode_routes(routes: Routes) -> str:
    buffer = io.BytesIO()
    np.save(buffer, routes)
    return pybase64.b64encode_as_string(buffer.getvalue())


def problem(status: int, body: bytes) -> str:
    """What an error reply says, in one line."""
    try:
        return f"HTTP {status}: {_errors.decode(body).error.message}"
    except msgspec.MsgspecError:
        return f"HTTP {status}: {body[:200].decode(errors='replace')}"
