"""Reads the requests of the embedded engine and builds its replies, as JSON in vLLM's shapes. Pure."""

import time
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np
from msgspec import Meta, Struct

from ...config.sections import Count, Natural, NonNegative
from ...errors import UNREADABLE
from ...model.scoring import TextScores
from ...records.task import Message
from ..engines.vllm import CompletionRequest, TopP
from ..rendering.tokenizer import Tokenizer
from ..replies.routes import encode_npy
from .scheduler import TokenSequence

Json = dict[str, Any]
T = TypeVar("T")

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
"""Fields that this engine does not know, and the values at which they change nothing."""


class BadRequest(Exception):
    """The request cannot be answered. The client gets the message, with `status`."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class ChatRequest(Struct, frozen=True):
    """The fields of `/v1/chat/completions` that this engine understands."""

    model: str
    messages: Annotated[list[Message], Meta(min_length=1)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    temperature: NonNegative = 1.0
    top_p: TopP = 1.0
    logprobs: bool = False
    return_token_ids: bool = False
    routed_experts_prompt_start: Natural | None = None
    stop_token_ids: list[int] = []
    seed: Natural | None = None


class ScoreRequest(Struct, frozen=True):
    """A request for the logprobs of prompts. The one token that is drawn is the most likely one."""

    model: str
    prompt: Annotated[list[list[int]], Meta(min_length=1)]
    max_tokens: Literal[1]
    temperature: Annotated[float, Meta(ge=0, le=0)]
    prompt_logprobs: Literal[0] | None = None


class _Prompt(Struct, frozen=True):
    prompt: msgspec.Raw = msgspec.Raw(b"")


class PauseRequest(Struct, frozen=True):
    """How to pause requests in flight. Only `keep`, which continues them later, is supported."""

    mode: Literal["keep"] = "keep"


class ReloadArgs(Struct, frozen=True):
    weights_path: str


class RpcRequest(Struct, frozen=True):
    method: Literal["reload_weights"]
    kwargs: ReloadArgs


class VersionRequest(Struct, frozen=True):
    new_version: str


def read(body: bytes, kind: type[T]) -> T:
    """Decode a body as `kind`. Refuses fields of NEUTRAL that would change the reply: this engine would
    ignore them. Other unknown fields are ignored."""
    try:
        fields = msgspec.json.decode(body or b"{}", type=Json)
        for name, neutral in NEUTRAL.items():
            value = fields.get(name)
            if value is not None and value not in neutral:
                raise BadRequest(
                    f"{name} = {value!r} is not supported by the embedded engine"
                )
        return msgspec.convert(fields, kind)
    except UNREADABLE as error:
        raise BadRequest(str(error)) from None


def wants_scores(body: bytes) -> bool:
    """Return whether a request has several prompts, which only have to be scored."""
    try:
        return bytes(msgspec.json.decode(body, type=_Prompt).prompt).startswith(b"[[")
    except UNREADABLE:
        return False  # `read` says what is wrong with it


def scored_choice(index: int, prompt: list[int], scores: TextScores, row: int) -> Json:
    """Return the choice of one prompt, which is text number `row` of `scores`."""
    logprobs = scores.logprobs[row].tolist()
    top_id, top_logprob = int(scores.top_ids[row]), float(scores.top_logprobs[row])
    pairs = zip(prompt[1:], logprobs, strict=True)
    choice: Json = {
        "index": index,
        "finish_reason": "length",
        "token_ids": [top_id],
        "logprobs": {"token_logprobs": [top_logprob]},
        "prompt_logprobs": [
            None,
            *({str(token): {"logprob": value}} for token, value in pairs),
        ],
    }
    if scores.routes is not None:
        choice["routed_experts"] = encode_npy(scores.routes[row].numpy().astype(np.uint16))
    return choice


def check_prompt(
    prompt: list[int], vocab_size: int, max_context: int, routes_start: int
) -> None:
    """Raise BadRequest for a prompt that the model cannot take."""
    if not prompt:
        raise BadRequest("the prompt is empty")
    if len(prompt) >= max_context:
        raise BadRequest(
            f"This model's maximum context length is {max_context} tokens, and the prompt has "
            f"{len(prompt)}, which leaves no room for a reply"
        )
    if max(prompt) >= vocab_size or min(prompt) < 0:
        raise BadRequest(f"token ids must lie between 0 and {vocab_size - 1}")
    if routes_start > len(prompt):
        raise BadRequest(f"routed_experts_prompt_start {routes_start} lies beyond the prompt")


def completion_reply(
    sequence: TokenSequence, request: CompletionRequest, tokenizer: Tokenizer
) -> Json:
    choice: Json = {
        "index": 0,
        "text": tokenizer.decode(sequence.tokens, skip_special_tokens=True),
        "logprobs": None,
        **_common_fields(sequence),
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
        choice["prompt_token_ids"] = sequence.request.prompt
    return {**_envelope("text_completion", request.model, sequence), "choices": [choice]}


def chat_reply(
    sequence: TokenSequence, request: ChatRequest, message: Json, tokenizer: Tokenizer
) -> Json:
    choice = {"index": 0, "message": message, "logprobs": None, **_common_fields(sequence)}
    if request.logprobs:
        content = []
        for token, logprob in zip(sequence.tokens, sequence.logprobs, strict=True):
            text = tokenizer.decode([token])
            content.append({"token": text, "logprob": logprob, "top_logprobs": []})
        choice["logprobs"] = {"content": content}
    reply = {**_envelope("chat.completion", request.model, sequence), "choices": [choice]}
    if request.return_token_ids:
        choice["token_ids"] = sequence.tokens
        reply["prompt_token_ids"] = sequence.request.prompt
    return reply


def _common_fields(sequence: TokenSequence) -> Json:
    fields: Json = {
        "finish_reason": sequence.finish_reason,
        "token_versions": sequence.versions,
    }
    if (routes := sequence.routes()) is not None:
        fields["routed_experts"] = encode_npy(routes)
    return fields


def _envelope(kind: str, model: str, sequence: TokenSequence) -> Json:
    num_prompt, num_drawn = len(sequence.request.prompt), len(sequence.tokens)
    prefix = "chatcmpl" if kind.startswith("chat") else "cmpl"
    return {
        "id": f"{prefix}-{sequence.request.id}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_drawn,
            "total_tokens": num_prompt + num_drawn,
        },
    }


def error_reply(message: str, status: int) -> Json:
    kind = "BadRequestError" if status < 500 else "InternalServerError"
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}
