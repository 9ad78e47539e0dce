"""An engine with weights that are a number: a real HTTP server in vLLM's dialect that can stop and come
back at the same address, with the weights it was first started with."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

METRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="m"}} {running}
vllm:num_requests_waiting{{engine="0",model_name="m"}} {waiting}
vllm:num_requests_waiting_by_reason{{engine="0",model_name="m",reason="capacity"}} 77.0
vllm:kv_cache_usage_perc{{engine="0",model_name="m"}} {cache}
"""


class VersionedEngine:
    """Notes what it was asked in `asked` (prompt, and the version it had then) and told in `calls`."""

    def __init__(self, *, model: str = "m", is_mute: bool = False, is_deaf: bool = False) -> None:
        self._model = model
        self._is_mute = is_mute
        """It does not say which version it has."""
        self._is_deaf = is_deaf
        """It does not load what it is given, and says nothing of that."""
        self.hangs_up_on: Callable[[list[int]], bool] = lambda prompt: False
        self.awake = asyncio.Event()
        """While it is not set, no small question is answered."""
        self.awake.set()
        self.load = {"running": 3.0, "waiting": 2.0, "cache": 0.5}
        self.version = "default"
        self.asked: list[tuple[list[int], str]] = []
        self.calls: list[str] = []
        self.url = ""
        self._port = 0
        self._runner: web.AppRunner | None = None
        self._changed = asyncio.Condition()

    async def start(self) -> None:
        """Serve, at the same port as before, with the weights of the first start."""
        assert self._runner is None
        self.version = "default"
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/v1/completions", self._complete)
        controls: dict[str, Callable[[web.Request], Awaitable[web.Response]]] = {
            "/pause": self._control,
            "/collective_rpc": self._control,
            "/reset_prefix_cache": self._control,
            "/update_weight_version": self._set_version,
            "/resume": self._control,
        }
        for path, handle in controls.items():
            app.router.add_post(path, handle)
        if not self._is_mute:
            app.router.add_get("/weight_info", self._weight_info)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port).start()
        self._port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self._port}"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def until(self, condition: Callable[[], bool]) -> None:
        """Until what it was asked and told makes this true."""
        async with self._changed:
            await self._changed.wait_for(condition)

    async def _note(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": self._model, "owned_by": "vllm"}]})

    async def _metrics(self, request: web.Request) -> web.Response:
        await self.awake.wait()
        return web.Response(text=METRICS.format(**self.load))

    async def _weight_info(self, request: web.Request) -> web.Response:
        self.calls.append("/weight_info")
        await self._note()
        return web.json_response({"weight_version": self.version})

    async def _control(self, request: web.Request) -> web.Response:
        self.calls.append(request.path)
        await self._note()
        return web.json_response({})

    async def _set_version(self, request: web.Request) -> web.Response:
        if not self._is_deaf:
            self.version = (await request.json())["new_version"]
        return await self._control(request)

    async def _complete(self, request: web.Request) -> web.Response:
        asked: dict[str, Any] = await request.json()
        self.asked.append((asked["prompt"], self.version))
        await self._note()
        if self.hangs_up_on(asked["prompt"]):
            assert request.transport is not None
            request.transport.abort()
        choice = {"finish_reason": "stop", "token_ids": [1], "logprobs": {"token_logprobs": [-0.5]}}
        return web.json_response({"choices": [choice]})


@asynccontextmanager
async def versioned_engine(**options: Any) -> AsyncIterator[VersionedEngine]:
    engine = VersionedEngine(**options)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()
