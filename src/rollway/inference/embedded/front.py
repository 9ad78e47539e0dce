"""The front: the HTTP process, which passes bodies to the decoder and its answers back, unread."""

import asyncio
import hmac
import itertools
import logging
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.typedefs import Middleware
from msgspec import msgpack
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from ...config.sections import ENGINE_KEY_VAR
from ...config.specs import EngineSpec
from ...errors import EngineError, ModelError, PartDied
from ...loop.processes import child
from ...loop.processes.part import Parent, run_part, unchanged
from ...loop.processes.port import bind_port, serve_app
from ...loop.watch.rarely import Rarely
from ...wire.pipe import AsyncPipe
from .calls import DecoderAnswer, DecoderCall, DecoderFacts, model_name

log = logging.getLogger(__name__)

HEALTH = "/health"
DECODER = "rollway.inference.embedded.decoder:serve_decoder"
MAX_BODY_BYTES = 64 << 20
SHUTDOWN_S = 1.0
"""How long requests in flight may continue when the engine ends."""

POSTS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/resume",
    "/collective_rpc",
    "/reset_prefix_cache",
    "/update_weight_version",
)
GETS = ("/is_paused", "/weight_info")

GONE = DecoderAnswer(0, 503, b"the decoder process has ended", "text/plain")


class DecoderClient:
    """Sends calls to the decoder and hands its answers to the callers."""

    def __init__(self, pipe: AsyncPipe, facts: DecoderFacts) -> None:
        self._pipe = pipe
        self.facts = facts
        self.waiting: dict[int, asyncio.Future[DecoderAnswer]] = {}
        self._ids = itertools.count(1)

    async def call(self, action: str, body: bytes = b"", accept: str = "") -> DecoderAnswer:
        """Return the decoder's answer. If the caller is cancelled, the decoder gives the request up."""
        call_id = next(self._ids)
        answer: asyncio.Future[DecoderAnswer] = asyncio.get_running_loop().create_future()
        self.waiting[call_id] = answer
        try:
            await self._pipe.send(msgpack.encode(DecoderCall(call_id, action, body, accept)))
            return await answer
        except ConnectionError:
            return GONE
        except asyncio.CancelledError:
            with suppress(ConnectionError):
                await self._pipe.send(msgpack.encode(DecoderCall(call_id, "abort")))
            raise
        finally:
            del self.waiting[call_id]

    async def listen(self) -> None:
        """Hand answers to their callers until the decoder ends, then raise PartDied."""
        answers = msgpack.Decoder(DecoderAnswer)
        while (frame := await self._pipe.receive()) is not None:
            answer = answers.decode(frame)
            waiting = self.waiting.get(answer.id)
            if waiting is not None and not waiting.done():
                waiting.set_result(answer)
        for waiting in self.waiting.values():
            if not waiting.done():
                waiting.set_result(GONE)
        raise PartDied("the embedded engine's decoder process died")


class EngineFront:
    def __init__(self, decoder: DecoderClient, model: str) -> None:
        self._decoder = decoder
        self._model = model
        self._registry = CollectorRegistry()
        options: dict[str, Any] = {"labelnames": ["model_name"], "registry": self._registry}
        helps = {
            "vllm:num_requests_running": "Requests being decoded",
            "vllm:num_requests_waiting": "Requests waiting for a slot",
            "vllm:kv_cache_usage_perc": "Share of the key-value cache's slots in use, 0 to 1",
        }
        gauges = [Gauge(name, text, **options).labels(model) for name, text in helps.items()]
        self._running, self._waiting, self._cache = gauges
        self._generated = Counter("vllm:generation_tokens", "Tokens drawn", **options).labels(
            model
        )
        self._num_generated = 0

    def app(self, key: str) -> web.Application:
        """Return the server. With a key, only requests that have it are answered."""
        guards = [demand_key(key)] if key else []
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=guards)
        app.router.add_get(HEALTH, self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/pause", self._pause)
        for path in POSTS:
            app.router.add_post(path, self._pass_on)
        for path in GETS:
            app.router.add_get(path, self._pass_on)
        return app

    async def _pass_on(self, request: web.Request) -> web.Response:
        body, accept = await request.read(), request.headers.get("Accept", "")
        return _response(await self._decoder.call(request.path, body, accept))

    async def _pause(self, request: web.Request) -> web.Response:
        mode = {"mode": request.query.get("mode", "abort")}
        return _response(await self._decoder.call("/pause", msgspec.json.encode(mode)))

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, request: web.Request) -> web.Response:
        window = self._decoder.facts.max_context
        model = {
            "id": self._model,
            "object": "model",
            "owned_by": "rollway",
            "max_model_len": window,
        }
        return web.json_response({"object": "list", "data": [model]})

    async def _metrics(self, request: web.Request) -> web.Response:
        answer = await self._decoder.call("load")
        if answer.status != 200:
            return _response(answer)
        load = msgspec.json.decode(answer.body, type=dict[str, int])
        self._running.set(load["running"])
        self._waiting.set(load["waiting"])
        self._cache.set(load["running"] / load["slots"])
        self._generated.inc(load["generated"] - self._num_generated)
        self._num_generated = load["generated"]
        return web.Response(body=generate_latest(self._registry), content_type="text/plain")


def demand_key(key: str) -> Middleware:
    """Return what refuses requests without the key, and logs the 1st, 2nd, 4th, 8th and so on."""
    expected, refused = f"Bearer {key}".encode(), Rarely()

    @web.middleware
    async def guard(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode(errors="replace")
        if request.path != HEALTH and not hmac.compare_digest(given, expected):
            if refused.add():
                log.warning("refused request %d: its key is missing or wrong", refused.count)
            error = {"message": "the key is missing or wrong", "code": 401}
            return web.json_response({"error": error}, status=401)
        return await handler(request)

    return guard


def _response(answer: DecoderAnswer) -> web.Response:
    return web.Response(
        body=answer.body, status=answer.status, content_type=answer.content_type
    )


@asynccontextmanager
async def _start_decoder(spec: EngineSpec) -> AsyncIterator[DecoderClient]:
    async with child.start("engine-decoder", DECODER, computes=True) as process:
        await process.send_spec(spec)
        first = await process.pipe.receive()
        if first is None:
            raise EngineError(
                "the embedded engine's decoder process ended while it loaded the model"
            )
        ready = msgpack.decode(first, type=DecoderAnswer)
        if ready.status != 200:
            raise ModelError(ready.body.decode())
        facts = msgspec.json.decode(ready.body, type=DecoderFacts)
        yield DecoderClient(process.pipe, facts)


def _open_socket(spec: EngineSpec) -> socket.socket:
    if spec.listen_fd is not None:
        return socket.socket(fileno=spec.listen_fd)
    return bind_port("engine.embedded.port", "127.0.0.1", spec.engine.local.port)


async def engine(spec: EngineSpec, parent: Parent) -> None:
    with _open_socket(spec) as sock:
        async with asyncio.TaskGroup() as tasks, _start_decoder(spec) as decoder:
            front = EngineFront(decoder, model_name(spec))
            app = front.app(os.environ.get(ENGINE_KEY_VAR, ""))
            async with serve_app(app, sock, SHUTDOWN_S) as address:
                listening = tasks.create_task(decoder.listen())
                parent.in_flight = lambda: len(decoder.waiting)
                await parent.report_ready(address)
                await parent.wait_until_gone()
                listening.cancel()


def main(name: str, sock: socket.socket) -> None:
    run_part(name, sock, EngineSpec, unchanged, engine)
