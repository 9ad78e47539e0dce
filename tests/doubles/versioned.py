"""An engine whose weights are only a version number: a real HTTP server in vLLM's dialect. It can stop
and start again at the same address, and does not know then which version it has."""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from rollway.records.ids import PolicyVersion
from rollway.records.probe import Probe, ProbeText

METRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="m"}} {running}
vllm:num_requests_waiting{{engine="0",model_name="m"}} {waiting}
vllm:num_requests_waiting_by_reason{{engine="0",model_name="m",reason="capacity"}} 77.0
vllm:kv_cache_usage_perc{{engine="0",model_name="m"}} {cache}
"""


def logprob(token: int, place: int, version: int) -> float:
    """The logprob of a token under these weights."""
    return -1.0 - (token * 7 + place * 3 + version * (token % 5 + 1)) % 11 / 10


def probe(version: int) -> Probe:
    """What a trainer writes beside the weights of a version."""
    texts = [tuple(range(first, first + 12)) for first in range(0, 96, 8)]
    before = max(0, version - 1)
    return Probe(
        PolicyVersion(version),
        "float32",
        tuple(
            ProbeText(
                text,
                tuple(logprob(text[place], place, version) for place in range(1, 12)),
                tuple(logprob(text[place], place, before) for place in range(1, 12)),
            )
            for text in texts
        ),
    )


class VersionedEngine:
    """Records completions in `requests` (prompt and the version it had then), other calls in `calls`."""

    def __init__(
        self,
        *,
        model: str = "m",
        hides_version: bool = False,
        ignores_updates: bool = False,
        max_model_len: int | None = None,
    ) -> None:
        self._model = {"id": model, "owned_by": "vllm", "max_model_len": max_model_len}
        self._hides_version = hides_version
        """It does not report which version it has."""
        self.ignores_updates = ignores_updates
        """It accepts new weights without loading them."""
        self.refuses_updates = False
        """It answers a load with status 500."""
        self.ignores_labels = False
        """It keeps its version, whatever it is told."""
        self.weights = 0
        """The version that it really has."""
        self.dtype, self.rounding = "float32", 0.0
        """Its number format, and how far that makes its logprobs differ."""
        self.logprobs_mode = "processed_logprobs"
        self.may_score = asyncio.Event()
        """While it is not set, requests for the logprobs of prompts wait."""
        self.may_score.set()
        self.hangs_up_on: Callable[[list[int]], bool] = lambda prompt: False
        self.aborts_next = 0
        """How many of the next replies are cut off."""
        self.is_failing = False
        """It answers completions with status 500."""
        self.busy: list[tuple[int, str]] = []
        """Status and Retry-After of its next answers."""
        self.stalls = False
        """It stops in the middle of a large reply."""
        self.padding = 0
        """Bytes that make its replies larger."""
        self.health_status = 200
        self.may_answer = asyncio.Event()
        """While it is not set, requests for metrics and models wait."""
        self.may_answer.set()
        self.load = {"running": 3.0, "waiting": 2.0, "cache": 0.5}
        self.version = "default"
        self.version_status = 200
        """The status of its answer when it is asked for its version."""
        self.requests: list[tuple[list[int], str]] = []
        self.calls: list[str] = []
        self.url = ""
        self._port = 0
        self._runner: web.AppRunner | None = None
        self._changed = asyncio.Condition()

    async def start(self, version: str = "default") -> None:
        """Serve at the same port as before, like a new process."""
        assert self._runner is None
        self.version, self.weights = version, 0
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/health", self._health)
        app.router.add_get("/server_info", self._server_info)
        app.router.add_post("/v1/completions", self._complete)
        controls: dict[str, Callable[[web.Request], Awaitable[web.Response]]] = {
            "/pause": self._control,
            "/collective_rpc": self._load,
            "/reset_prefix_cache": self._control,
            "/update_weight_version": self._set_version,
            "/resume": self._control,
        }
        for path, handle in controls.items():
            app.router.add_post(path, handle)
        if not self._hides_version:
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

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition`, which depends on requests and calls, is true."""
        async with self._changed:
            await self._changed.wait_for(condition)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _models(self, request: web.Request) -> web.Response:
        await self.may_answer.wait()
        return web.json_response({"data": [self._model]})

    async def _metrics(self, request: web.Request) -> web.Response:
        await self.may_answer.wait()
        return web.Response(text=METRICS.format(**self.load))

    async def _server_info(self, request: web.Request) -> web.Response:
        model = {"dtype": f"torch.{self.dtype}", "logprobs_mode": self.logprobs_mode}
        return web.json_response({"vllm_config": {"model_config": model}})

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=self.health_status)

    async def _weight_info(self, request: web.Request) -> web.Response:
        self.calls.append("/weight_info")
        await self._notify()
        report = {"weight_version": self.version}
        return web.json_response(report, status=self.version_status)

    async def _control(self, request: web.Request) -> web.Response:
        self.calls.append(request.path)
        await self._notify()
        return web.json_response({})

    async def _set_version(self, request: web.Request) -> web.Response:
        if not self.ignores_labels:
            self.version = (await request.json())["new_version"]
        return await self._control(request)

    async def _load(self, request: web.Request) -> web.Response:
        path = (await request.json())["kwargs"]["weights_path"]
        if self.refuses_updates:
            return web.json_response({"error": {"message": "no such tensor"}}, status=500)
        if not self.ignores_updates:
            found = re.search(r"step_(\d+)$", path)
            self.weights = int(found[1]) if found else self.weights
        return await self._control(request)

    def _score(self, prompts: list[list[int]]) -> web.Response:
        choices = []
        for index, prompt in enumerate(prompts):
            found = [
                {str(token): {"logprob": logprob(token, place, self.weights) + self.rounding}}
                for place, token in enumerate(prompt)
                if place
            ]
            choice = {"index": index, "logprobs": {"token_logprobs": [-0.5]}}
            choices.append({**choice, "prompt_logprobs": [None, *found]})
        return web.json_response({"choices": choices})

    async def _stall(self, request: web.Request) -> web.Response:
        reply = web.StreamResponse(headers={"Content-Length": str(1 << 20)})
        await reply.prepare(request)
        await reply.write(b'{"choices": [{"text": "')
        await asyncio.sleep(3600)
        raise AssertionError("nobody waits that long")

    async def _complete(self, request: web.Request) -> web.Response:
        request_body: dict[str, Any] = await request.json()
        if isinstance(request_body["prompt"][0], list):
            await self.may_score.wait()
            return self._score(request_body["prompt"])
        self.requests.append((request_body["prompt"], self.version))
        await self._notify()
        if self.hangs_up_on(request_body["prompt"]):
            assert request.transport is not None
            request.transport.abort()
        if self.busy:
            status, after = self.busy.pop(0)
            refusal = {"error": {"message": "busy"}}
            return web.json_response(refusal, status=status, headers={"Retry-After": after})
        if self.stalls:
            return await self._stall(request)
        if self.is_failing:
            error = {"message": "EngineCore encountered an issue"}
            return web.json_response({"error": error}, status=500)
        self.aborts_next -= (is_aborted := self.aborts_next > 0)
        choice = {
            "finish_reason": "abort" if is_aborted else "stop",
            "token_ids": [1],
            "logprobs": {"token_logprobs": [-0.5]},
        }
        reply: dict[str, Any] = {"choices": [choice]}
        if self.padding:
            reply["padding"] = "x" * self.padding
        return web.json_response(reply)


@asynccontextmanager
async def versioned_engine(**options: Any) -> AsyncIterator[VersionedEngine]:
    engine = VersionedEngine(**options)
    await engine.start("0")
    try:
        yield engine
    finally:
        await engine.stop()
