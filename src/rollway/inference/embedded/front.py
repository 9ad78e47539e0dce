"""The embedded engine's HTTP front: passes bodies to the core and its answers back, unread."""

import asyncio
import itertools
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import msgspec
from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from ...config.specs import EngineSpec
from ...errors import EngineError, ModelError, PartDied
from ...loop.processes import child
from ...loop.processes.part import Parent, as_it_is, run_part
from ...loop.processes.port import claimed
from ...wire.pipe import AsyncPipe
from .calls import DecoderAnswer, DecoderCall, model_name

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 << 20
MAX_BACKLOG = 4096
SHUTDOWN_S = 1.0
"""How long requests in flight may take to end when the engine does."""

POSTS = {
    "/v1/completions": "completions",
    "/v1/chat/completions": "chat",
    "/resume": "resume",
    "/collective_rpc": "collective_rpc",
    "/reset_prefix_cache": "reset_prefix_cache",
    "/update_weight_version": "update_weight_version",
}
GETS = {"/is_paused": "is_paused", "/weight_info": "weight_info"}


GONE = DecoderAnswer(0, 503, b"the model's process is gone", "text/plain")


class DecoderClient:
    """Calls to the core and the answers they wait for."""

    def __init__(self, pipe: AsyncPipe) -> None:
        self._pipe = pipe
        self._waiting: dict[int, asyncio.Future[DecoderAnswer]] = {}
        self._ids = itertools.count(1)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    async def call(self, action: str, body: bytes = b"", accept: str = "") -> DecoderAnswer:
        """The core's answer. A caller that goes away takes its request with it."""
        id = next(self._ids)
        answer: asyncio.Future[DecoderAnswer] = asyncio.get_running_loop().create_future()
        self._waiting[id] = answer
        try:
            await self._pipe.send(msgspec.msgpack.encode(DecoderCall(id, action, body, accept)))
            return await answer
        except ConnectionError:
            return GONE
        except asyncio.CancelledError:
            with suppress(ConnectionError):
                abort = DecoderCall(next(self._ids), "abort", str(id).encode())
                await self._pipe.send(msgspec.msgpack.encode(abort))
            raise
        finally:
            del self._waiting[id]

    async def listen(self) -> None:
        """Hand answers to their callers until the core is gone."""
        answers = msgspec.msgpack.Decoder(DecoderAnswer)
        while (frame := await self._pipe.receive()) is not None:
            answer = answers.decode(frame)
            waiting = self._waiting.get(answer.id)
            if waiting is not None and not waiting.done():
                waiting.set_result(answer)
        gone = PartDied("the embedded engine's model process died")
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_result(GONE)
        raise gone


class EngineFront:
    """The routes of the HTTP server."""

    def __init__(self, core: DecoderClient, model: str) -> None:
        self._core = core
        self._model = model
        self._registry = CollectorRegistry()
        running, waiting = "Requests being decoded", "Requests waiting for a slot"
        cache = "Slots of the key-value cache in use, 1 for all"
        label, to = ["model_name"], self._registry
        self._running = Gauge("vllm:num_requests_running", running, label, registry=to)
        self._waiting = Gauge("vllm:num_requests_waiting", waiting, label, registry=to)
        self._cache = Gauge("vllm:kv_cache_usage_perc", cache, label, registry=to)
        self._generated = Counter("vllm:generation_tokens", "Tokens drawn", label, registry=to)
        self._num_generated = 0

    def app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/pause", self._pause)
        for path in POSTS:
            app.router.add_post(path, self._post)
        for path in GETS:
            app.router.add_get(path, self._get)
        return app

    async def _post(self, request: web.Request) -> web.Response:
        accept = request.headers.get("Accept", "")
        return _response(await self._core.call(POSTS[request.path], await request.read(), accept))

    async def _get(self, request: web.Request) -> web.Response:
        return _response(await self._core.call(GETS[request.path]))

    async def _pause(self, request: web.Request) -> web.Response:
        mode = {"mode": request.query.get("mode", "abort")}
        return _response(await self._core.call("pause", msgspec.json.encode(mode)))

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": self._model, "object": "model"}]})

    async def _metrics(self, request: web.Request) -> web.Response:
        answer = await self._core.call("load")
        if answer is GONE:
            return _response(answer)
        load = msgspec.json.decode(answer.body, type=dict[str, int])
        self._running.labels(self._model).set(load["running"])
        self._waiting.labels(self._model).set(load["waiting"])
        self._cache.labels(self._model).set(load["running"] / load["slots"])
        self._generated.labels(self._model).inc(load["generated"] - self._num_generated)
        self._num_generated = load["generated"]
        return web.Response(body=generate_latest(self._registry), content_type="text/plain")


def _response(answer: DecoderAnswer) -> web.Response:
    return web.Response(body=answer.body, status=answer.status, content_type=answer.content_type)


@asynccontextmanager
async def _core(part: EngineSpec) -> AsyncIterator[DecoderClient]:
    """The core's process, with its model loaded."""
    async with child.start(
        "engine-core", "rollway.inference.embedded.decoder:serve_decoder", computes=True
    ) as process:
        await process.begin_with(msgspec.msgpack.encode(part))
        first = await process.pipe.receive()
        if first is None:
            raise EngineError("the embedded engine's model process ended while loading")
        ready = msgspec.msgpack.decode(first, type=DecoderAnswer)
        if ready.status != 200:
            raise ModelError(ready.body.decode())
        yield DecoderClient(process.pipe)


@asynccontextmanager
async def _listening(app: web.Application, sock: socket.socket) -> AsyncIterator[str]:
    """The server on a bound socket; gives the address it is reached at."""
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=SHUTDOWN_S)
    await runner.setup()
    try:
        await web.SockSite(runner, sock, backlog=MAX_BACKLOG).start()
        host, port = sock.getsockname()
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


def _socket(part: EngineSpec) -> socket.socket:
    if part.listen_fd is not None:
        return socket.socket(fileno=part.listen_fd)
    return claimed("engine.embedded.port", "127.0.0.1", part.engine.local.port)


async def engine(part: EngineSpec, parent: Parent) -> None:
    """Serve until the parent is gone."""
    with _socket(part) as sock:
        async with asyncio.TaskGroup() as tasks, _core(part) as core:
            front = EngineFront(core, model_name(part))
            async with _listening(front.app(), sock) as address:
                listening = tasks.create_task(core.listen())
                parent.in_flight = lambda: core.num_waiting
                await parent.ready(address)
                await parent.gone()
                listening.cancel()


def main(name: str, sock: socket.socket) -> None:
    run_part(name, sock, EngineSpec, as_it_is, engine)
