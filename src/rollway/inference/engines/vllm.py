"""The dialect of vLLM and of the embedded engine: `/v1/completions` with token ids as prompt.

Routes arrive as base64 of a .npy file in `choices[0].routed_experts`. Some versions put the routes of
the prompt into `prompt_routed_experts`, and only those of the completion into the choice.
"""

import io
from typing import Annotated

import msgspec
import numpy as np
import pybase64
from msgspec import UNSET, Meta, Struct, UnsetType

from ...config.sections import Count, Natural, NonNegative
from ...errors import UNREADABLE, EngineError, ReplyAborted
from ...records.turn import Routes, Sampling
from ..http.framing import Bytes
from ..replies.body import Bulks, BulkString
from ..replies.columns import ReplyColumns, make_columns
from ..replies.routes import WantedRoutes, decode_npy, unneeded_chars
from .dialect import EngineCall, ProbeAnswer, Prompt, Texts, WeightUpdate
from .status import LoadGauges

ROUTES = b'"routed_experts"'
PROMPT_ROUTES = b'"prompt_routed_experts"'
TopP = Annotated[float, Meta(gt=0, le=1)]


class CompletionRequest(Struct, frozen=True):
    """The fields of `/v1/completions` that rollway sends and its embedded engine understands. All are
    always sent: vLLM takes a missing field from the model's generation config, and would then sample
    from another distribution than the trainer assumes."""

    model: str
    prompt: list[int]
    max_tokens: Count = 16
    temperature: NonNegative = 1.0
    top_p: TopP = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    logprobs: Natural | None = None
    return_token_ids: bool = False
    routed_experts_prompt_start: Natural = 0
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    seed: Natural | None = None
    cache_salt: Annotated[str, Meta(min_length=1)] | UnsetType = UNSET


class _Request(CompletionRequest, frozen=True):
    """A CompletionRequest whose prompt is JSON already."""

    prompt: msgspec.Raw  # type: ignore[assignment]


class _Logprobs(Struct, frozen=True):
    token_logprobs: list[float]


class _Choice(Struct, frozen=True):
    finish_reason: str | None
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    token_versions: list[int] | None = None


class _Reply(Struct, frozen=True):
    choices: Annotated[list[_Choice], Meta(min_length=1)]


_replies = msgspec.json.Decoder(_Reply)


class _ProbeRequest(Struct, frozen=True):
    """Asks for one token after each text, the most likely one. Prompt logprobs are those of temperature
    1, whatever the temperature is, and are never read from the prefix cache."""

    model: str
    prompt: Texts
    prompt_logprobs: int | UnsetType
    max_tokens: int = 1
    temperature: float = 0.0
    logprobs: int = 0
    return_token_ids: bool = True
    repetition_penalty: float = 1.0


class _Logprob(Struct, frozen=True):
    logprob: float


class _ProbeChoice(Struct, frozen=True):
    index: int
    logprobs: _Logprobs
    prompt_logprobs: list[dict[str, _Logprob] | None] | None = None
    routed_experts: str | None = None


class _ProbeReply(Struct, frozen=True):
    choices: list[_ProbeChoice]


_probe_replies = msgspec.json.Decoder(_ProbeReply)


class Vllm:
    name = "vllm"
    path = "/v1/completions"
    weight_version = EngineCall("/weight_info")
    gauges = LoadGauges(
        b"vllm:num_requests_running",
        b"vllm:num_requests_waiting",
        b"vllm:kv_cache_usage_perc",
    )

    def encode_request(
        self,
        model: str,
        prompt: Prompt,
        sampling: Sampling,
        stop_ids: list[int],
        start: int | None,
        salt: str = "",
    ) -> bytes:
        request = _Request(
            model=model,
            prompt=msgspec.Raw(b"[" + prompt.text + b"]"),
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            logprobs=0,
            return_token_ids=True,
            # without a start all routes are unwanted, and vLLM can leave out those of the prompt
            routed_experts_prompt_start=len(prompt) if start is None else start,
            stop_token_ids=stop_ids,
            cache_salt=salt or UNSET,
        )
        return msgspec.json.encode(request)

    def encode_probe(self, model: str, texts: Texts, *, reads_cache: bool = False) -> bytes:
        return msgspec.json.encode(_ProbeRequest(model, texts, UNSET if reads_cache else 0))

    def parse_probe(self, body: Bytes) -> list[ProbeAnswer]:
        try:
            choices = _probe_replies.decode(body).choices
            return [
                _probe_answer(choice) for choice in sorted(choices, key=lambda c: c.index)
            ]
        except (*UNREADABLE, ValueError) as error:
            raise EngineError(f"the engine's logprobs cannot be read: {error}") from None

    def unneeded_chars(self, key: bytes, bulk: BulkString, wanted: WantedRoutes) -> int:
        return unneeded_chars(bulk, wanted, is_prompt_only=key == PROMPT_ROUTES)

    def parse_columns(self, rest: Bytes) -> ReplyColumns:
        try:
            choice = _replies.decode(rest).choices[0]
        except UNREADABLE as error:
            raise EngineError(f"the engine's reply is not a completion: {error}") from None
        logprobs = choice.logprobs.token_logprobs if choice.logprobs else None
        return make_columns(
            choice.token_ids, logprobs, choice.token_versions, choice.finish_reason
        )

    def decode_routes(
        self, bulks: Bulks, wanted: WantedRoutes, num_drawn: int
    ) -> Routes | None:
        bulk, prompt_bulk = bulks.get(ROUTES), bulks.get(PROMPT_ROUTES)
        if bulk is None:
            return None
        if prompt_bulk is None:
            return decode_npy(bulk, wanted.start, wanted.num_positions(num_drawn))
        # one bulk holds the tokens of the prompt, the other the drawn tokens but the last
        prompt_routes = decode_npy(prompt_bulk, wanted.start, wanted.num_prompt)
        return np.concatenate((prompt_routes, decode_npy(bulk, 0, num_drawn - 1)))

    def weight_update(
        self, path: str, version: int, *, has_plugin: bool = False
    ) -> WeightUpdate:
        reload: dict[str, object] = {
            "method": "reload_weights",
            "kwargs": {"weights_path": path},
        }
        if has_plugin:
            order = {"weights_path": path, "version": str(version)}
            reload = {"method": "load_version", "kwargs": order}
        new = {"new_version": str(version)}
        load = (
            EngineCall("/collective_rpc", msgspec.json.encode(reload)),
            EngineCall("/reset_prefix_cache?reset_running_requests=true"),
        )
        label = EngineCall("/update_weight_version", msgspec.json.encode(new))
        return WeightUpdate(
            EngineCall("/pause?mode=keep"), load, EngineCall("/resume"), label
        )


def _probe_answer(choice: _ProbeChoice) -> ProbeAnswer:
    if not choice.logprobs.token_logprobs:
        raise ReplyAborted("the engine's answer to a probe is not whole")
    found = [
        next(iter(token.values())).logprob for token in choice.prompt_logprobs or [] if token
    ]
    routes = None
    if choice.routed_experts is not None:
        routes = np.load(io.BytesIO(pybase64.b64decode(choice.routed_experts, validate=True)))
    return ProbeAnswer(tuple(found), choice.logprobs.token_logprobs[0], routes)
