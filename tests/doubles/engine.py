"""An engine that is not a model: a real HTTP server that answers by what it is asked.

It speaks vLLM's dialect over the tiny tokenizer. The reply is a function of the prompt's text, and
each token's routes are a function of the tokens up to it, so that any interleaving gives the same.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web

from rollway.inference.routes import encode_npy
from rollway.inference.tokenizer import Tokenizer

LAYERS, TOPK, EXPERTS = 2, 2, 8
Answer = Callable[[str], str]


def routes_of(ids: list[int]) -> Any:
    """Expert choices of every token, each a hash of all tokens up to it."""
    seen = np.cumsum(np.array(ids, np.uint64) * 2654435761 + 1)
    grid = seen[:, None, None] + np.arange(LAYERS * TOPK).reshape(LAYERS, TOPK)
    return (grid % EXPERTS).astype(np.uint8)


class EngineDouble:
    """Counts what it is asked; `answer` maps the last user message to a reply."""

    def __init__(self, tokenizer: Tokenizer, answer: Answer, latency_s: float) -> None:
        self._tokenizer = tokenizer
        self._answer = answer
        self._latency_s = latency_s
        self.url = ""
        self.prompts: list[list[int]] = []
        self.replies: list[list[int]] = []
        self.num_running = 0
        self._changed = asyncio.Condition()
        self.num_aborted = 0

    async def _running_changes(self, by: int) -> None:
        async with self._changed:
            self.num_running += by
            self._changed.notify_all()

    async def until_running(self, count: int) -> None:
        """Until so many requests are in flight."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.num_running == count)

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "double"}]})

    async def completions(self, request: web.Request) -> web.Response:
        asked = await request.json()
        await self._running_changes(+1)
        try:
            await asyncio.sleep(self._latency_s)
        except asyncio.CancelledError:
            self.num_aborted += 1
            raise
        finally:
            await self._running_changes(-1)
        prompt: list[int] = asked["prompt"]
        text = self._tokenizer.decode(prompt)
        said = text.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]
        drawn = [*self._tokenizer.encode(self._answer(said)), asked["stop_token_ids"][0]]
        finish = "stop"
        if len(drawn) > asked["max_tokens"]:
            drawn, finish = drawn[: asked["max_tokens"]], "length"
        self.prompts.append(prompt)
        self.replies.append(drawn)
        start = asked.get("routed_experts_prompt_start") or 0
        choice = {
            "index": 0,
            "text": self._tokenizer.decode(drawn),
            "finish_reason": finish,
            "token_ids": drawn,
            "logprobs": {"token_logprobs": [-0.5] * len(drawn)},
            "routed_experts": encode_npy(routes_of(prompt + drawn)[start:-1]),
        }
        return web.json_response({"choices": [choice]})


@asynccontextmanager
async def engine_double(
    folder: Path, answer: Answer, latency_s: float = 0.0
) -> AsyncIterator[EngineDouble]:
    """The server on a free port; `folder` holds the tokenizer."""
    double = EngineDouble(Tokenizer(str(folder)), answer, latency_s)
    app = web.Application()
    app.router.add_get("/v1/models", double.models)
    app.router.add_post("/v1/completions", double.completions)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        double.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield double
    finally:
        await runner.cleanup()
