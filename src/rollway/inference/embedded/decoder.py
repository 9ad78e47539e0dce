"""The process that decodes. It has no event loop: it takes calls between two steps and answers them.

Calls and answers are frames on the pipe to the HTTP front; an answer's body is finished, so that
the front passes bytes on and never reads them.
"""

import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from ...config.specs import EngineSpec
from ...errors import RollwayError
from ...model.load import load_model, load_weights
from ...wire.pipe import BlockingPipe
from ..engines.vllm import CompletionRequest
from ..rendering.tokenizer import Tokenizer
from ..replies.columns import SAFETENSORS
from . import requests
from .calls import DecoderAnswer, DecoderCall, model_name
from .requests import BadRequest, ChatRequest
from .scheduler import Scheduler, TokenSequence
from .slots import SlotModel

if TYPE_CHECKING:
    from ..rendering.rendering import SyncRenderer


class Decoder:
    """The model, its scheduler, and what clients may ask of them."""

    def __init__(self, part: EngineSpec) -> None:
        torch.set_num_threads(part.engine.local.threads)
        self._config = part
        self._model = load_model(part.weights, part.engine.local.dtype)
        self._tokenizer = Tokenizer(part.model.path)
        self._rendering: SyncRenderer | None = None
        slots = SlotModel(self._model, part.engine.local.max_batch, part.engine.max_context)
        self._scheduler = Scheduler(slots, part.seed)
        self._scheduler.version = part.version
        self._replies: dict[int, Callable[[TokenSequence], DecoderAnswer]] = {}
        self._num_generated = 0
        self._actions: dict[str, Callable[[DecoderCall], dict[str, Any] | None]] = {
            "completions": self._complete,
            "chat": self._chat,
            "abort": self._abort,
            "pause": self._pause,
            "resume": self._resume,
            "is_paused": lambda call: {"is_paused": self._scheduler.paused},
            "collective_rpc": self._reload,
            "reset_prefix_cache": lambda call: {},  # there is none: prompts are always processed
            "update_weight_version": self._set_version,
            "weight_info": lambda call: {"weight_version": str(self._scheduler.version)},
            "load": self._load,
        }

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    def handle(self, call: DecoderCall) -> DecoderAnswer | None:
        """Do what a call asks. None: its answer comes later, or it needs none."""
        try:
            reply = self._actions[call.action](call)
        except BadRequest as error:
            reply = requests.error_reply(str(error), error.status)
            return DecoderAnswer(call.id, error.status, msgspec.json.encode(reply))
        except RollwayError as error:
            reply = requests.error_reply(str(error), 500)
            return DecoderAnswer(call.id, 500, msgspec.json.encode(reply))
        return None if reply is None else DecoderAnswer(call.id, 200, msgspec.json.encode(reply))

    def step(self) -> list[DecoderAnswer]:
        """One decoding step; the answers of what finished in it."""
        answers = []
        for sequence in self._scheduler.step():
            self._num_generated += len(sequence.tokens)
            answers.append(self._replies.pop(sequence.ask.id)(sequence))
        return answers

    def _complete(self, call: DecoderCall) -> None:
        request: CompletionRequest = requests.read(call.body, CompletionRequest)
        if request.logprobs:
            raise BadRequest("logprobs above 0 is not supported: only the drawn token's is returned")
        binary = SAFETENSORS in call.accept and request.logprobs == 0 and request.return_token_ids

        def reply(sequence: TokenSequence) -> DecoderAnswer:
            if binary:
                return DecoderAnswer(call.id, 200, requests.binary_reply(sequence), SAFETENSORS)
            return _json(call, requests.completion_reply(sequence, request, self._tokenizer))

        self._add(call, request.prompt, request, request.max_tokens, reply, eos=not request.ignore_eos)

    def _chat(self, call: DecoderCall) -> None:
        request: ChatRequest = requests.read(call.body, ChatRequest)
        rendering = self._rendering = self._rendering or self._open_rendering()
        try:
            prompt = rendering.prompt(request.messages)
        except Exception as error:  # a chat template raises what it likes
            raise BadRequest(f"these messages cannot be rendered: {error}") from error
        room = self._config.engine.max_context - len(prompt)
        max_tokens = request.max_completion_tokens or request.max_tokens or max(1, room)

        def reply(sequence: TokenSequence) -> DecoderAnswer:
            parsed = rendering.parse(sequence.tokens)
            message = {"role": "assistant", "content": parsed.content}
            if parsed.reasoning:
                message["reasoning_content"] = parsed.reasoning
            return _json(call, requests.chat_reply(sequence, request, message, self._tokenizer))

        self._add(call, prompt, request, max_tokens, reply, eos=True)

    def _open_rendering(self) -> "SyncRenderer":
        """Only chats need it, and its import alone takes a second."""
        from ..rendering.rendering import SyncRenderer

        return SyncRenderer(self._config.model)

    def _add(
        self, call: DecoderCall, prompt: list[int], request: CompletionRequest | ChatRequest,
        max_tokens: int, reply: Callable[[TokenSequence], DecoderAnswer], *, eos: bool,
    ) -> None:  # fmt: skip
        served = model_name(self._config)
        if request.model not in (served, self._config.model.path):
            raise BadRequest(f"The model '{request.model}' does not exist; this is '{served}'", 404)
        stop_ids = frozenset(request.stop_token_ids) | (self._eos_ids() if eos else frozenset())
        ask = requests.ask_from(
            call.id, prompt, request,
            max_tokens=max_tokens, stop_ids=stop_ids,
            vocab_size=self._model.config.vocab_size,
            max_context=self._config.engine.max_context,
        )  # fmt: skip
        self._scheduler.add(ask)
        self._replies[call.id] = reply

    def _eos_ids(self) -> frozenset[int]:
        eos = self._model.generation_config.eos_token_id or self._model.config.eos_token_id
        return frozenset([eos] if isinstance(eos, int) else eos or ())

    def _abort(self, call: DecoderCall) -> None:
        """Clients that hang up: the body is the id of what they asked for."""
        id = int(call.body)
        self._scheduler.abort(id)
        self._replies.pop(id, None)

    def _pause(self, call: DecoderCall) -> dict[str, Any]:
        requests.read(call.body, requests.PauseRequest)
        self._scheduler.paused = True
        return {"status": "paused"}

    def _resume(self, call: DecoderCall) -> dict[str, Any]:
        self._scheduler.paused = False
        return {"status": "resumed"}

    def _reload(self, call: DecoderCall) -> dict[str, Any]:
        rpc: requests.RpcRequest = requests.read(call.body, requests.RpcRequest)
        load_weights(self._model, rpc.kwargs.weights_path)
        return {"results": [None]}

    def _set_version(self, call: DecoderCall) -> dict[str, Any]:
        request: requests.VersionRequest = requests.read(call.body, requests.VersionRequest)
        if not request.new_version.isdigit():
            raise BadRequest(f"new_version must be a whole number, not {request.new_version!r}")
        self._scheduler.version = int(request.new_version)
        return {"success": True, "new_version": request.new_version}

    def _load(self, call: DecoderCall) -> dict[str, Any]:
        return {
            "running": self._scheduler.num_running,
            "waiting": self._scheduler.num_waiting,
            "slots": self._config.engine.local.max_batch,
            "generated": self._num_generated,
        }


def _json(call: DecoderCall, reply: dict[str, Any]) -> DecoderAnswer:
    return DecoderAnswer(call.id, 200, msgspec.json.encode(reply))


def serve_decoder(name: str, sock: socket.socket) -> None:
    """Load the model, then decode and answer until the front is gone."""
    pipe = BlockingPipe(sock)
    first = pipe.receive()
    if first is None:
        return
    try:
        core = Decoder(msgspec.msgpack.decode(first, type=EngineSpec))
    except RollwayError as error:
        pipe.send(msgspec.msgpack.encode(DecoderAnswer(0, 500, str(error).encode())))
        return
    pipe.send(msgspec.msgpack.encode(DecoderAnswer(0, 200, b"")))
    calls = msgspec.msgpack.Decoder(DecoderCall)
    while True:
        while pipe.ready(0 if core.has_work else None):
            frame = pipe.receive()
            if frame is None:
                return
            answer = core.handle(calls.decode(frame))
            if answer is not None:
                pipe.send(msgspec.msgpack.encode(answer))
        for answer in core.step():
            pipe.send(msgspec.msgpack.encode(answer))
