"""The decoder: the process with the model. It has no event loop: it takes calls between two passes.

Calls and answers are frames on the pipe to the front. The decoder encodes the whole body of an answer,
so that the front passes the bytes on without reading them.
"""

import socket
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec
import torch
from msgspec import msgpack

from ...config.specs import EngineSpec
from ...errors import RollwayError
from ...loop.processes.child import receive_spec
from ...model.load import load_model, load_weights
from ...model.shape import parse_shape
from ...vllm.binary_reply import SAFETENSORS, encode_reply
from ..engines.vllm import CompletionRequest
from ..rendering.tokenizer import Tokenizer
from . import requests
from .calls import DecoderAnswer, DecoderCall, DecoderFacts, model_name
from .requests import BadRequest, ChatRequest, Json, ScoreRequest
from .scheduler import GenerationRequest, Scheduler, TokenSequence
from .slots import open_slots

if TYPE_CHECKING:
    from ..rendering.rendering import SyncRenderer

STARTED = "default"
"""The version that an engine reports until it is told which one it has."""
ReplyBuilder = Callable[[TokenSequence], DecoderAnswer]


class Decoder:
    """The model, its scheduler, and the actions that the front may call."""

    def __init__(self, spec: EngineSpec) -> None:
        local = spec.engine.local
        torch.set_num_threads(local.threads)
        self._spec = spec
        self._model = load_model(
            spec.weights, local.dtype, trusts_code=spec.model.trust_remote_code
        )
        config = self._model.config.get_text_config()
        self._vocab_size = config.vocab_size
        shape = parse_shape(config.to_dict())
        limits = spec.engine.embedded_context, shape.max_context
        self._max_context = min(filter(None, limits))
        self.facts = DecoderFacts(self._max_context)
        self._tokenizer = Tokenizer(spec.model.path)
        self._slots = open_slots(self._model, local.max_batch, self._max_context)
        self.scheduler = Scheduler(self._slots, spec.seed)
        self.scheduler.version = spec.version
        self._label = STARTED
        self._replies: dict[int, ReplyBuilder] = {}
        self._num_generated = 0
        self._actions: dict[str, Callable[[DecoderCall], Json | None]] = {
            "/v1/completions": self._complete,
            "/v1/chat/completions": self._chat,
            "abort": self._abort,
            "/pause": self._pause,
            "/resume": self._resume,
            "/is_paused": lambda call: {"is_paused": self.scheduler.paused},
            "/collective_rpc": self._reload,
            "/reset_prefix_cache": lambda call: {},  # nothing is cached between requests
            "/update_weight_version": self._set_version,
            "/weight_info": lambda call: {"weight_version": self._label},
            "load": self._load,
        }

    def handle(self, call: DecoderCall) -> DecoderAnswer | None:
        """Do what a call asks for. None means that its answer comes later, or that it has none."""
        try:
            reply = self._actions[call.action](call)
        except (BadRequest, RollwayError) as error:
            status = error.status if isinstance(error, BadRequest) else 500
            return _encode(call, requests.error_reply(str(error), status), status)
        return None if reply is None else _encode(call, reply)

    def run_pass(self) -> list[DecoderAnswer]:
        """Run one forward pass and return the answers of the requests that it finished."""
        answers = []
        for sequence in self.scheduler.run_pass():
            self._num_generated += len(sequence.tokens)
            answers.append(self._replies.pop(sequence.request.id)(sequence))
        return answers

    def _complete(self, call: DecoderCall) -> Json | None:
        if requests.wants_scores(call.body):
            return self._score(requests.read(call.body, ScoreRequest))
        request = requests.read(call.body, CompletionRequest)
        if request.logprobs:
            raise BadRequest(
                "logprobs above 0 is not supported: only the drawn token has a logprob"
            )
        binary = (
            SAFETENSORS in call.accept and request.logprobs == 0 and request.return_token_ids
        )

        def reply(sequence: TokenSequence) -> DecoderAnswer:
            if binary:
                reason, routes = sequence.finish_reason, sequence.routes()
                columns = sequence.tokens, sequence.logprobs, sequence.versions
                body = encode_reply(*columns, reason, routes)
                return DecoderAnswer(call.id, 200, body, SAFETENSORS)
            return _encode(
                call, requests.completion_reply(sequence, request, self._tokenizer)
            )

        stop_ids = frozenset() if request.ignore_eos else self._eos_ids()
        self._add(call, request.prompt, request, request.max_tokens, stop_ids, reply)
        return None

    def _score(self, request: ScoreRequest) -> Json:
        """Answer at once, between two passes, and also while decoding is paused."""
        self._check_model(request.model)
        for prompt in request.prompt:
            requests.check_prompt(prompt, self._vocab_size, self._max_context, 0)
        replies: list[Json] = [{}] * len(request.prompt)
        for length in {len(prompt) for prompt in request.prompt}:
            places = [n for n, prompt in enumerate(request.prompt) if len(prompt) == length]
            texts = [request.prompt[place] for place in places]
            scores = self._slots.score(torch.tensor(texts))
            for row, place in enumerate(places):
                replies[place] = requests.scored_choice(place, texts[row], scores, row)
        return {"object": "text_completion", "model": request.model, "choices": replies}

    def _chat(self, call: DecoderCall) -> None:
        request = requests.read(call.body, ChatRequest)
        renderer = self._renderer
        try:
            prompt = renderer.prompt(request.messages)
        except Exception as error:  # a chat template may raise anything
            raise BadRequest(f"these messages cannot be rendered: {error}") from error
        room = max(1, self._max_context - len(prompt))
        max_tokens = request.max_completion_tokens or request.max_tokens or room

        def reply(sequence: TokenSequence) -> DecoderAnswer:
            parsed = renderer.parse(sequence.tokens)
            message = {"role": "assistant", "content": parsed.content}
            if parsed.reasoning:
                message["reasoning_content"] = parsed.reasoning
            return _encode(
                call, requests.chat_reply(sequence, request, message, self._tokenizer)
            )

        self._add(call, prompt, request, max_tokens, self._eos_ids(), reply)

    @cached_property
    def _renderer(self) -> "SyncRenderer":
        """Only chats need the renderer, and its import takes a second."""
        from ..rendering.rendering import SyncRenderer

        return SyncRenderer(self._spec.model)

    def _add(
        self, call: DecoderCall, prompt: list[int], request: CompletionRequest | ChatRequest,
        max_tokens: int, stop_ids: frozenset[int], reply: ReplyBuilder,
    ) -> None:  # fmt: skip
        self._check_model(request.model)
        start = request.routed_experts_prompt_start or 0
        requests.check_prompt(prompt, self._vocab_size, self._max_context, start)
        generation = GenerationRequest(
            id=call.id,
            prompt=prompt,
            max_tokens=max_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
            stop_ids=stop_ids.union(request.stop_token_ids),
            routes_start=start,
            seed=request.seed,
        )
        self.scheduler.add(generation)
        self._replies[call.id] = reply

    def _check_model(self, name: str) -> None:
        served = model_name(self._spec)
        if name not in (served, self._spec.model.path):
            raise BadRequest(f"The model '{name}' does not exist; this is '{served}'", 404)

    def _eos_ids(self) -> frozenset[int]:
        model = self._model
        config = model.config.get_text_config()
        eos = model.generation_config.eos_token_id or config.eos_token_id
        return frozenset([eos] if isinstance(eos, int) else eos or ())

    def _abort(self, call: DecoderCall) -> None:
        self.scheduler.abort(call.id)
        self._replies.pop(call.id, None)

    def _pause(self, call: DecoderCall) -> Json:
        requests.read(call.body, requests.PauseRequest)
        self.scheduler.paused = True
        return {"status": "paused"}

    def _resume(self, call: DecoderCall) -> Json:
        self.scheduler.paused = False
        return {"status": "resumed"}

    def _reload(self, call: DecoderCall) -> Json:
        rpc = requests.read(call.body, requests.RpcRequest)
        trusts_code = self._spec.model.trust_remote_code
        load_weights(self._model, rpc.kwargs.weights_path, trusts_code=trusts_code)
        return {"results": [None]}

    def _set_version(self, call: DecoderCall) -> Json:
        version = requests.read(call.body, requests.VersionRequest).new_version
        if not version.isdigit():
            raise BadRequest(f"new_version must be a whole number, not {version!r}")
        self.scheduler.version, self._label = int(version), version
        return {"success": True, "new_version": version}

    def _load(self, call: DecoderCall) -> Json:
        return {
            **self.scheduler.load,
            "slots": self._spec.engine.local.max_batch,
            "generated": self._num_generated,
        }


def _encode(call: DecoderCall, reply: Json, status: int = 200) -> DecoderAnswer:
    return DecoderAnswer(call.id, status, msgspec.json.encode(reply))


def serve_decoder(name: str, sock: socket.socket) -> None:
    """Load the model, then decode and answer calls until the front is gone."""
    pipe, spec = receive_spec(sock, EngineSpec)
    try:
        decoder = Decoder(spec)
    except RollwayError as error:
        pipe.send(msgpack.encode(DecoderAnswer(0, 500, str(error).encode())))
        return
    facts = msgspec.json.encode(decoder.facts)
    pipe.send(msgpack.encode(DecoderAnswer(0, 200, facts)))
    calls = msgpack.Decoder(DecoderCall)
    while True:
        while pipe.ready(0 if decoder.scheduler.has_work else None):
            frame = pipe.receive()
            if frame is None:
                return
            answer = decoder.handle(calls.decode(frame))
            if answer is not None:
                pipe.send(msgpack.encode(answer))
        for answer in decoder.run_pass():
            pipe.send(msgpack.encode(answer))
