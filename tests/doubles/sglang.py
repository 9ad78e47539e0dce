"""A server that speaks SGLang's dialect, written from its documentation: a real model answers, that of
an embedded engine behind it."""

import base64
import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import aiohttp
import numpy as np
from aiohttp import web

from tests.doubles.stand_ins import background

Json = dict[str, Any]


class SglangDouble:
    """`has_routes` is the flag --enable-return-routed-experts. A server that `ignores_loads` says that
    it has loaded new weights, and keeps those it has."""

    def __init__(self, target: str, *, has_routes: bool, ignores_loads: bool) -> None:
        self._target = target
        self._has_routes = has_routes
        self._ignores_loads = ignores_loads
        self.paths: list[str] = []
        self.url = ""

    async def start(self) -> None:
        self._session = aiohttp.ClientSession()
        app = web.Application(client_max_size=1 << 30)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/server_info", self._server_info)
        app.router.add_get("/model_info", self._model_info)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/health", self._health)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/{control:.*}", self._control)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"

    async def stop(self) -> None:
        await self._runner.cleanup()
        await self._session.close()

    async def _ask(self, method: str, path: str, body: Json | None = None) -> Json:
        async with self._session.request(method, self._target + path, json=body) as reply:
            assert reply.status == 200, await reply.text()
            answer: Json = await reply.json(content_type=None) or {}
            return answer

    async def _models(self, request: web.Request) -> web.Response:
        (model,) = (await self._ask("GET", "/v1/models"))["data"]
        return web.json_response({"data": [{**model, "owned_by": "sglang"}]})

    async def _server_info(self, request: web.Request) -> web.Response:
        flags = {
            "enable_return_routed_experts": self._has_routes,
            "disable_radix_cache": False,
        }
        info = {"model_path": "/model", "dtype": "float32", "enable_lora": None, **flags}
        return web.json_response(info)

    async def _model_info(self, request: web.Request) -> web.Response:
        return web.json_response(await self._ask("GET", "/weight_info"))

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text="sglang:num_running_reqs 0\nsglang:num_queue_reqs 0\n")

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _control(self, request: web.Request) -> web.Response:
        self.paths.append(request.path)
        body = await request.json()
        match request.path:
            case "/pause_generation":
                await self._ask("POST", "/pause?mode=keep")
            case "/continue_generation":
                await self._ask("POST", "/resume")
            case "/update_weights_from_disk" if not self._ignores_loads:
                order = {"weights_path": body["model_path"]}
                call = {"method": "reload_weights", "kwargs": order}
                await self._ask("POST", "/collective_rpc", call)
            case "/update_weight_version":
                new = {"new_version": body["new_version"]}
                await self._ask("POST", "/update_weight_version", new)
        return web.json_response({"success": True, "message": "done"})

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        ids, sampling = body["input_ids"], body["sampling_params"]
        common = {"model": "", "logprobs": 0, "return_token_ids": True,
                  "max_tokens": sampling["max_new_tokens"],
                  "temperature": sampling["temperature"]}  # fmt: skip
        (model,) = (await self._ask("GET", "/v1/models"))["data"]
        common["model"] = model["id"]
        if isinstance(ids[0], list):
            order = {**common, "prompt": ids, "prompt_logprobs": 0}
            choices = (await self._ask("POST", "/v1/completions", order))["choices"]
            replies = [self._reply(choice, body) for choice in choices]
            return web.json_response(replies)
        order = {**common, "prompt": ids, "top_p": sampling["top_p"],
                 "stop_token_ids": sampling["stop_token_ids"],
                 "routed_experts_prompt_start": body["routed_experts_start_len"]}  # fmt: skip
        (choice,) = (await self._ask("POST", "/v1/completions", order))["choices"]
        return web.json_response(self._reply(choice, body))

    def _reply(self, choice: Json, body: Json) -> Json:
        found = choice["logprobs"]["token_logprobs"]
        ids = choice.get("token_ids") or [0] * len(found)
        meta: Json = {
            "finish_reason": {"type": choice.get("finish_reason") or "length"},
            "output_token_logprobs": [
                [value, id, None] for value, id in zip(found, ids, strict=True)
            ],
        }
        if choice.get("prompt_logprobs"):
            values = [
                next(iter(token.values()))["logprob"] if token else None
                for token in choice["prompt_logprobs"]
            ]
            meta["input_token_logprobs"] = [[value, 0, None] for value in values]
        if self._has_routes and body.get("return_routed_experts"):
            routes = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])))
            bare = routes.astype(np.int32).tobytes()
            meta["routed_experts"] = base64.b64encode(bare).decode()
        return {"text": "", "meta_info": meta}


@contextmanager
def sglang_double(
    target: str, *, has_routes: bool = True, ignores_loads: bool = False
) -> Iterator[SglangDouble]:
    with background() as loop:
        double = SglangDouble(target, has_routes=has_routes, ignores_loads=ignores_loads)
        loop.run(double.start())
        try:
            yield double
        finally:
            loop.run(double.stop())
