"""A chat endpoint that is not a model: a real HTTP server that answers by what it is asked.

What it does with a request is a function of the last message and of how often that was said before,
so that any interleaving gives the same.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from rollway.testing.engine import served

Answer = Callable[[str, int], "str | web.Response | dict[str, Any]"]


class ChatDouble:
    """Keeps what it was asked. `answer` maps the last message, and how often it came before, to a text,
    a whole message, or a response of any kind; messages that `is_held` picks wait for `release`."""

    def __init__(self, answer: Answer, key: str, models: tuple[str, ...]) -> None:
        self._answer = answer
        self._key = key
        self._models = models
        self.url = ""
        self.asked: list[dict[str, Any]] = []
        self.said: Counter[str] = Counter()
        self.is_held: Callable[[str], bool] = lambda said: False
        self.release = asyncio.Event()
        self.num_held = 0
        self.num_aborted = 0
        self._changed = asyncio.Condition()

    async def until_held(self, count: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self.num_held == count)

    async def _held_changes(self, by: int) -> None:
        async with self._changed:
            self.num_held += by
            self._changed.notify_all()

    def _refused(self, request: web.Request) -> web.Response | None:
        if self._key and request.headers.get("Authorization") != f"Bearer {self._key}":
            return web.json_response({"error": {"message": "who are you?"}}, status=401)
        return None

    async def models(self, request: web.Request) -> web.Response:
        if refused := self._refused(request):
            return refused
        if not self._models:
            return web.Response(status=404)
        return web.json_response({"object": "list", "data": [{"id": one} for one in self._models]})

    async def completions(self, request: web.Request) -> web.Response:
        if refused := self._refused(request):
            return refused
        asked = await request.json()
        said: str = asked["messages"][-1]["content"]
        nth = self.said[said]
        self.said[said] += 1
        self.asked.append(asked)
        if self.is_held(said):
            await self._hold()
        answer = self._answer(said, nth)
        if isinstance(answer, web.Response):
            return answer
        message = answer if isinstance(answer, dict) else {"role": "assistant", "content": answer}
        text = message.get("content") or ""
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        if message.get("tool_calls"):
            choice["finish_reason"] = "tool_calls"
        usage = {"prompt_tokens": 7, "completion_tokens": len(text)}
        return web.json_response({"choices": [choice], "usage": usage})

    async def _hold(self) -> None:
        await self._held_changes(+1)
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.num_aborted += 1
            raise
        finally:
            await self._held_changes(-1)


@asynccontextmanager
async def chat_double(
    answer: Answer, key: str = "", models: tuple[str, ...] = ("double",)
) -> AsyncIterator[ChatDouble]:
    """The server on a free port; without `models` it lists none."""
    double = ChatDouble(answer, key, models)
    app = web.Application()
    app.router.add_get("/v1/models", double.models)
    app.router.add_post("/v1/chat/completions", double.completions)
    async with served(app) as url:
        double.url = f"{url}/v1"
        yield double
