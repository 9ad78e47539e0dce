"""vLLM's dialect of `/v1/completions` with token-id prompts: requests out, turns in. Pure.

A request asks for ids, logprobs and, by `routed_experts_prompt_start`, for the routes of new
positions only. A reply carries routes as base64 of a .npy file in `choices[0].routed_experts`.
"""

import io
from typing import Annotated

import msgspec
import numpy as np
import pybase64
from msgspec import Meta, Struct

from ..errors import EngineError
from ..records.turn import Floats, Ints, Routes, Sampling, Turn


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
    routed_experts: str | None = None
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
    body: bytes, prompt_ids: Ints, sampling: Sampling, version: int, routes_start: int | None
) -> Turn:
    """A reply's body as a turn; `version` is what sampled it where the engine does not say."""
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
    routes, start = None, 0
    if routes_start is not None:
        routes, start = _routes(choice, len(prompt_ids), routes_start)
    return Turn(
        prompt_ids=prompt_ids,
        completion_ids=np.array(choice.token_ids, np.int32),
        logprobs=_finite(choice.logprobs.token_logprobs),
        versions=np.array(versions, np.int32),
        temperature=sampling.temperature,
        finish_reason=choice.finish_reason or "abort",
        routes=routes,
        routes_start=start,
    )


def _finite(values: list[float]) -> Floats:
    logprobs = np.array(values, np.float32)
    if not np.isfinite(logprobs).all():
        raise EngineError("the engine's reply has logprobs that are not finite")
    return logprobs


def _routes(choice: _Choice, num_prompt: int, asked_start: int) -> tuple[Routes, int]:
    """The routes and the position they start at: where asked, or 0 if the engine sent them all."""
    if choice.routed_experts is None:
        raise EngineError(
            "the engine's reply has no routes: start it with --enable-return-routed-experts, or set "
            "engine.routes=false for a model without experts"
        )
    assert choice.token_ids is not None
    routes = decode_routes(choice.routed_experts)
    all_positions = num_prompt + len(choice.token_ids) - 1
    return routes, 0 if len(routes) == all_positions else asked_start


def decode_routes(text: str) -> Routes:
    """Base64 of a .npy file of uint8 or uint16 `[tokens, layers, topk]`."""
    try:
        raw = pybase64.b64decode(text, validate=True)
        routes: Routes = np.load(io.BytesIO(raw), allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise EngineError(f"the engine's routes cannot be read: {error}") from None
    if routes.ndim != 3 or routes.dtype not in (np.uint8, np.uint16):
        raise EngineError(f"the engine's routes are {routes.dtype}{list(routes.shape)}")
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
