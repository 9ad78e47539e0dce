"""An engine that is not a model: a real HTTP server that answers by what it is asked.

It speaks vLLM's dialect over token ids. The reply is a function of the conversation, and each token's
routes are a function of the tokens up to it, so that any interleaving gives the same.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web

from ..inference.rendering.tokenizer import Tokenizer
from ..inference.replies.routes import encode_npy
from ..records.turn import Routes
from .model import model_folder
from .script import Answer, Script, ScriptedReply

LAYERS, TOPK, EXPERTS = 2, 2, 8


def routes_of(ids: list[int]) -> Routes:
    """Expert choices of every token, each a hash of all tokens up to it."""
    seen = np.cumsum(np.array(ids, np.uint64) * 2654435761 + 1)
    grid = seen[:, None, None] + np.arange(LAYERS * TOPK).reshape(LAYERS, TOPK)
    return (grid % EXPERTS).astype(np.uint8)


class ScriptedEngine:
    """Remembers what it was asked and drew; `errors` are exceptions of the script's own."""

    def __init__(self, script: Script, latency_s: float) -> None:
        self._script = script
        self._latency_s = latency_s
        self._changed = asyncio.Condition()
        self.url = ""
        self.prompts: list[list[int]] = []
        self.replies: list[list[int]] = []
        self.errors: list[Exception] = []
        self.num_running = 0
        self.num_aborted = 0

    @property
    def answer(self) -> Answer:
        return self._script.answer

    @answer.setter
    def answer(self, answer: Answer) -> None:
        """From the next request on."""
        self._script.answer = answer

    async def until_running(self, count: int) -> None:
        """Until so many requests are in flight."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.num_running == count)

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "scripted"}]})

    async def completions(self, request: web.Request) -> web.Response:
        asked = await request.json()
        await self._running_changes(+1)
        try:
            await asyncio.sleep(self._latency_s)
            drawn = await self._script.draw(
                asked["prompt"], asked["max_tokens"], asked["stop_token_ids"][0]
            )
        except asyncio.CancelledError:
            self.num_aborted += 1
            raise
        except Exception as error:  # whatever the test's own script raises
            self.errors.append(error)
            message = f"the script raised {error!r}"
            return web.json_response({"error": {"message": message}}, status=500)
        finally:
            await self._running_changes(-1)
        self.prompts.append(asked["prompt"])
        self.replies.append(drawn.token_ids)
        return web.json_response({"choices": [_choice(asked, drawn)]})

    async def _running_changes(self, by: int) -> None:
        async with self._changed:
            self.num_running += by
            self._changed.notify_all()


def _choice(asked: dict[str, Any], drawn: ScriptedReply) -> dict[str, Any]:
    choice = {
        "index": 0,
        "finish_reason": drawn.finish_reason,
        "token_ids": drawn.token_ids,
        "logprobs": {"token_logprobs": [-0.5] * len(drawn.token_ids)},
    }
    start = asked.get("routed_experts_prompt_start")
    if start is None:
        return choice
    routes = routes_of(asked["prompt"] + drawn.token_ids)[start:-1]
    return {**choice, "routed_experts": encode_npy(routes)}


@asynccontextmanager
async def scripted_engine(
    answer: Answer, *, latency_s: float = 0.0, folder: Path | None = None
) -> AsyncIterator[ScriptedEngine]:
    """The server on a free port of this host. `folder` holds the tokenizer of the model it stands for;
    without one it is that of `model_folder()`."""
    tokenizer = Tokenizer(str(folder or model_folder()))
    engine = ScriptedEngine(Script(tokenizer, answer), latency_s)
    app = web.Application(client_max_size=1 << 30)
    app.router.add_get("/v1/models", engine.models)
    app.router.add_post("/v1/completions", engine.completions)
    async with served(app) as engine.url:
        yield engine


@asynccontextmanager
async def served(app: web.Application) -> AsyncIterator[str]:
    """Its address on a free port of this host. A client that hangs up cancels its request; the block's
    end cuts off those that still run."""
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
