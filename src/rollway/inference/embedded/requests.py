"""What the embedded engine is asked and answers: JSON in and out, in vLLM's shapes. Pure."""

import time
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from ...errors import UNREADABLE
from ...records.task import Message
from ..engines.vllm import CompletionRequest
from ..rendering.tokenizer import Tokenizer
from ..replies.columns import encode_reply
from ..replies.routes import encode_npy
from .scheduler import GenerationRequest, TokenSequence

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "stop": ("", []),
    "tools": ([],),
    "logit_bias": ({},),
    "top_k": (0, -1),
    "min_p": (0,),
    "repetition_penalty": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
}
"""Fields this engine does not know, with the values at which they change nothing."""


class BadRequest(Exception):
    """The request cannot be answered; `status` and the message go back to the client."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class ChatRequest(Struct, frozen=True):
    """The fields of `/v1/chat/completions` this engine understands."""

    model: str
    messages: Annotated[list[Message], Meta(min_length=1)]
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    logprobs: bool = False
    return_token_ids: bool = False
    routed_experts_prompt_start: Annotated[int, Meta(ge=0)] | None = None
    stop_token_ids: list[int] = []
    seed: Annotated[int, Meta(ge=0)] | None = None


class PauseRequest(Struct, frozen=True):
    """How requests in flight are treated; only freezing them is supported."""

    mode: Literal["keep"] = "keep"


class ReloadArgs(Struct, frozen=True):
    weights_path: str


class RpcRequest(Struct, frozen=True):
    """A call of every engine worker; only `reload_weights` is supported."""

    method: Literal["reload_weights"]
    kwargs: ReloadArgs


class VersionRequest(Struct, frozen=True):
    new_version: str


def read(body: bytes, kind: type[Any]) -> Any:
    """The body as `kind`; refuses fields that would silently be ignored."""
    try:
        fields = msgspec.json.decode(body or b"{}", type=dict[str, Any])
        for name, neutral in NEUTRAL.items():
            value = fields.get(name)
            if value is not None and value not in neutral:
                raise BadRequest(f"{name} = {value!r} is not supported by the embedded engine")
        return msgspec.convert(fields, kind)
    except UNREADABLE as error:
        raise BadRequest(str(error)) from None


def ask_from(
    id: int, prompt: list[int], request: CompletionRequest | ChatRequest, *,
    max_tokens: int, stop_ids: frozenset[int], vocab_size: int, max_context: int,
) -> GenerationRequest:  # fmt: skip
    """Check a prompt against the model and the cache."""
    if not prompt:
        raise BadRequest("the prompt is empty")
    if len(prompt) >= max_context:
        raise BadRequest(
            f"This model's maximum context length is {max_context} tokens, and the prompt has "
            f"{len(prompt)}, which leaves no room for a reply"
        )
    if max(prompt) >= vocab_size or min(prompt) < 0:
        raise BadRequest(f"token ids must lie between 0 and {vocab_size - 1}")
    start = request.routed_experts_prompt_start or 0
    if start > len(prompt):
        raise BadRequest(f"routed_experts_prompt_start {start} lies beyond the prompt")
    return GenerationRequest(
        id=id,
        prompt=prompt,
        max_tokens=max_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        stop_ids=stop_ids,
        routes_start=start,
        seed=request.seed,
    )


def completion_reply(
    sequence: TokenSequence, request: CompletionRequest, tokenizer: Tokenizer
) -> dict[str, Any]:
    """vLLM's answer to `/v1/completions`."""
    choice: dict[str, Any] = {
        "index": 0,
        "text": tokenizer.decode(sequence.tokens, skip_special_tokens=True),
        "logprobs": None,
        **_ending(sequence),
    }
    if request.logprobs is not None:
        tokens = [tokenizer.decode([token]) for token in sequence.tokens]
        pairs = zip(tokens, sequence.logprobs, strict=True)
        choice["logprobs"] = {
            "tokens": tokens,
            "token_logprobs": sequence.logprobs,
            "top_logprobs": [{token: logprob} for token, logprob in pairs],
        }
    if request.return_token_ids:
        choice["token_ids"] = sequence.tokens
        choice["prompt_token_ids"] = sequence.ask.prompt
    return {**_envelope("text_completion", request.model, sequence), "choices": [choice]}


def binary_reply(sequence: TokenSequence) -> bytes:
    """The same without text: columns for a client that takes safetensors."""
    return encode_reply(
        sequence.tokens, sequence.logprobs, sequence.versions, sequence.finish_reason, sequence.routes()
    )


def chat_reply(
    sequence: TokenSequence, request: ChatRequest, message: dict[str, Any], tokenizer: Tokenizer
) -> dict[str, Any]:
    """vLLM's answer to `/v1/chat/completions`."""
    choice: dict[str, Any] = {"index": 0, "message": message, "logprobs": None, **_ending(sequence)}
    if request.logprobs:
        pairs = zip(sequence.tokens, sequence.logprobs, strict=True)
        content = [
            {"token": tokenizer.decode([token]), "logprob": logprob, "top_logprobs": []}
            for token, logprob in pairs
        ]
        choice["logprobs"] = {"content": content}
    reply = {**_envelope("chat.completion", request.model, sequence), "choices": [choice]}
    if request.return_token_ids:
        choice["token_ids"] = sequence.tokens
        reply["prompt_token_ids"] = sequence.ask.prompt
    return reply


def _ending(sequence: TokenSequence) -> dict[str, Any]:
    """How it ended, under which weights, by which experts."""
    ending: dict[str, Any] = {
        "finish_reason": sequence.finish_reason,
        "token_versions": sequence.versions,
    }
    routes = sequence.routes()
    if routes is not None:
        ending["routed_experts"] = encode_npy(routes)
    return ending


def _envelope(kind: str, model: str, sequence: TokenSequence) -> dict[str, Any]:
    prompt, drawn = len(sequence.ask.prompt), len(sequence.tokens)
    return {
        "id": f"{'chatcmpl' if kind.startswith('chat') else 'cmpl'}-{sequence.ask.id}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": drawn,
            "total_tokens": prompt + drawn,
        },
    }


def error_reply(message: str, status: int) -> dict[str, Any]:
    kind = "BadRequestError" if status < 500 else "InternalServerError"
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}
