"""The dialect of SGLang: `/generate` takes and returns token ids, and routes as base64 of bare int32."""

import math
from typing import Any

import msgspec
import numpy as np
import pybase64
from msgspec import Struct

from ...errors import UNREADABLE, EngineError, ReplyAborted
from ...model.shape import ModelShape
from ...records.turn import Routes, Sampling
from ..http.framing import Bytes
from ..replies.body import Bulks, BulkString
from ..replies.columns import ReplyColumns, make_columns
from ..replies.routes import WantedRoutes, decode_bare
from .dialect import EngineCall, ProbeAnswer, Prompt, Texts, WeightUpdate
from .status import LoadGauges

ROUTES = b'"routed_experts"'


class _Sampling(Struct, frozen=True):
    """All parameters that shape the distribution, so that no default of the model applies."""

    max_new_tokens: int
    temperature: float
    top_p: float
    stop_token_ids: list[int]
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    no_stop_trim: bool = True
    skip_special_tokens: bool = False


class _Request(Struct, frozen=True):
    input_ids: msgspec.Raw
    sampling_params: _Sampling
    return_logprob: bool = True
    return_routed_experts: bool = False
    routed_experts_start_len: int = 0
    stream: bool = False


class _Finish(Struct, frozen=True):
    type: str
    message: str = ""


class _Meta(Struct, frozen=True):
    finish_reason: _Finish | None = None
    output_token_logprobs: list[tuple[float | None, int, Any]] | None = None


class _Reply(Struct, frozen=True):
    meta_info: _Meta


_replies = msgspec.json.Decoder(_Reply)


class _ProbeSampling(Struct, frozen=True):
    max_new_tokens: int = 1
    temperature: float = 0.0


class _ProbeRequest(Struct, frozen=True):
    """Asks for the logprobs of all input tokens. SGLang does not read its cache for them."""

    input_ids: Texts
    sampling_params: _ProbeSampling = _ProbeSampling()
    return_logprob: bool = True
    logprob_start_len: int = 0
    return_routed_experts: bool = False


class _ProbeMeta(Struct, frozen=True):
    input_token_logprobs: list[tuple[float | None, int, Any]]
    output_token_logprobs: list[tuple[float, int, Any]]
    routed_experts: str | None = None


class _ProbeReply(Struct, frozen=True):
    meta_info: _ProbeMeta


_probe_replies = msgspec.json.Decoder(list[_ProbeReply])


class Sglang:
    """The dialect of SGLang. Its routes come without their shape, which the model's config must give."""

    name = "sglang"
    path = "/generate"
    weight_version = EngineCall("/model_info")
    gauges = LoadGauges(
        b"sglang:num_running_reqs", b"sglang:num_queue_reqs", b"sglang:token_usage"
    )

    def __init__(self, shape: ModelShape | None) -> None:
        self._shape = shape

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
            input_ids=msgspec.Raw(b"[" + prompt.text + b"]"),
            sampling_params=_Sampling(
                max_new_tokens=sampling.max_tokens,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                stop_token_ids=stop_ids,
            ),
            return_routed_experts=start is not None,
            routed_experts_start_len=start or 0,
        )
        return msgspec.json.encode(request)

    def encode_probe(self, model: str, texts: Texts, *, reads_cache: bool = False) -> bytes:
        request = _ProbeRequest(texts, return_routed_experts=self._shape_has_experts)
        return msgspec.json.encode(request)

    def parse_probe(self, body: Bytes) -> list[ProbeAnswer]:
        try:
            replies = _probe_replies.decode(body)
            return [self._probe_answer(reply.meta_info) for reply in replies]
        except (*UNREADABLE, ValueError) as error:
            raise EngineError(f"the engine's logprobs cannot be read: {error}") from None

    def _probe_answer(self, meta: _ProbeMeta) -> ProbeAnswer:
        found = [
            logprob for logprob, _, _ in meta.input_token_logprobs if logprob is not None
        ]
        if not meta.output_token_logprobs:
            raise ReplyAborted("the engine's answer to a probe is not whole")
        routes, shape = None, self._shape
        if meta.routed_experts is not None and shape is not None:
            bare = pybase64.b64decode(meta.routed_experts, validate=True)
            grid = (-1, shape.num_layers, shape.topk)
            routes = np.frombuffer(bare, np.int32).reshape(grid)
        return ProbeAnswer(tuple(found), meta.output_token_logprobs[0][0], routes)

    @property
    def _shape_has_experts(self) -> bool:
        return self._shape is not None and self._shape.has_experts

    def unneeded_chars(self, key: bytes, bulk: BulkString, wanted: WantedRoutes) -> int:
        # without a header, only the full length shows which positions arrived
        return 0

    def parse_columns(self, rest: Bytes) -> ReplyColumns:
        try:
            meta = _replies.decode(rest).meta_info
        except UNREADABLE as error:
            raise EngineError(f"the engine's reply is not a generation: {error}") from None
        finish = meta.finish_reason or _Finish("abort")
        if finish.type == "abort":
            reason = finish.message or "it gave no reason"
            raise ReplyAborted(f"the engine aborted the request: {reason}")
        drawn = meta.output_token_logprobs
        if drawn is None:
            raise EngineError("the engine's reply has no output_token_logprobs")
        token_ids = [token_id for _, token_id, _ in drawn]
        logprobs = [math.nan if logprob is None else logprob for logprob, _, _ in drawn]
        return make_columns(token_ids, logprobs, None, finish.type)

    def decode_routes(
        self, bulks: Bulks, wanted: WantedRoutes, num_drawn: int
    ) -> Routes | None:
        bulk = bulks.get(ROUTES)
        if bulk is None:
            return None
        if self._shape is None or not (self._shape.num_layers and self._shape.topk):
            raise EngineError(
                "SGLang sends routes without their shape, and config.json of 'model.path' does not say "
                "how many layers and experts the model has: set 'model.path' to the served model"
            )
        return decode_bare(bulk, self._shape, wanted.start, wanted.num_positions(num_drawn))

    def weight_update(
        self, path: str, version: int, *, has_plugin: bool = False
    ) -> WeightUpdate:
        """The pause returns running requests to the queue. They continue with the new weights."""
        order = {"model_path": path, "flush_cache": True}
        new = {"new_version": str(version), "abort_all_requests": False}
        load = (EngineCall("/update_weights_from_disk", msgspec.json.encode(order)),)
        pause = EngineCall("/pause_generation", msgspec.json.encode({"mode": "retract"}))
        label = EngineCall("/update_weight_version", msgspec.json.encode(new))
        return WeightUpdate(pause, load, EngineCall("/continue_generation", b"{}"), label)
