"""An engine without a model: a real HTTP server whose replies come from a script.

It speaks vLLM's dialect over token ids. The reply is a function of the conversation, and each token's
routes are a function of the tokens up to it, so that requests may arrive in any order.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web

from ..inference.rendering.tokenizer import Tokenizer
from ..inference.replies.routes import encode_npy
from ..loop.processes.port import bind_port, serve_app
from ..records.turn import Routes
from .model import model_folder
from .script import Answer, ScriptedReply, draw

LAYERS, TOPK, EXPERTS = 3, 2, 8


def routes_of(ids: list[int]) -> Routes:
    """Return the expert choices of every token, each a hash of all tokens up to it."""
    seen = np.cumsum(np.array(ids, np.uint64) * 2654435761 + 1)
    grid = seen[:, None, None] + np.arange(LAYERS * TOPK).reshape(LAYERS, TOPK)
    return (grid % EXPERTS).astype(np.uint8)


class ScriptedEngine:
    """Remembers the prompts and replies of all requests, and the `errors` that the script raised."""

    def __init__(
        self, answer: Answer, tokenizer: Tokenizer, latency_s: float, max_context: int | None
    ) -> None:
        self._tokenizer = tokenizer
        self._max_context = max_context
        self._latency_s = latency_s
        self._changed = asyncio.Condition()
        self.answer = answer
        """The script. A test may replace it: that counts from the next request on."""
        self.url = ""
        self.prompts: list[list[int]] = []
        self.replies: list[list[int]] = []
        self.errors: list[Exception] = []
        self.num_running = 0
        self.num_aborted = 0

    async def until_running(self, count: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self.num_running == count)

    async def models(self, request: web.Request) -> web.Response:
        model = {"id": "scripted", "max_model_len": self._max_context}
        return web.json_response({"object": "list", "data": [model]})

    async def completions(self, request: web.Request) -> web.Response:
        body = await request.json()
        prompt, limit, stop_id = body["prompt"], body["max_tokens"], body["stop_token_ids"][0]
        await self._change_running(+1)
        try:
            await asyncio.sleep(self._latency_s)
            reply = await draw(self.answer, self._tokenizer, prompt, limit, stop_id)
        except asyncio.CancelledError:
            self.num_aborted += 1
            raise
        except Exception as error:  # a test's script raises what it likes
            self.errors.append(error)
            message = f"the script raised {error!r}"
            return web.json_response({"error": {"message": message}}, status=500)
        finally:
            await self._change_running(-1)
        self.prompts.append(prompt)
        self.replies.append(reply.token_ids)
        return web.json_response({"choices": [_choice(body, reply)]})

    async def _change_running(self, by: int) -> None:
        async with self._changed:
            self.num_running += by
            self._changed.notify_all()


def _choice(body: dict[str, Any], reply: ScriptedReply) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": 0,
        "finish_reason": reply.finish_reason,
        "token_ids": reply.token_ids,
        "logprobs": {"token_logprobs": [-0.5] * len(reply.token_ids)},
    }
    start = body.get("routed_experts_prompt_start")
    if start is not None:
        routes = routes_of(body["prompt"] + reply.token_ids)[start:-1]
        choice["routed_experts"] = encode_npy(routes)
    return choice


@asynccontextmanager
async def scripted_engine(
    answer: Answer,
    *,
    latency_s: float = 0.0,
    folder: Path | None = None,
    max_context: int | None = None,
) -> AsyncIterator[ScriptedEngine]:
    """Serve a scripted engine on a free port of this host. `folder` holds the tokenizer of the model
    that the engine stands for; by default `model_folder()`. `max_context` is its context window."""
    tokenizer = Tokenizer(str(folder or model_folder()))
    engine = ScriptedEngine(answer, tokenizer, latency_s, max_context)
    app = web.Application(client_max_size=1 << 30)
    app.router.add_get("/v1/models", engine.models)
    app.router.add_post("/v1/completions", engine.completions)
    async with served(app) as engine.url:
        yield engine


def served(app: web.Application) -> AbstractAsyncContextManager[str]:
    """Serve an app on a free port of this host, and yield its address."""
    return serve_app(app, bind_port("port", "127.0.0.1", None))
