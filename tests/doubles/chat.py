"""A chat endpoint without a model: a real HTTP server whose answer depends on the request.

The answer is a function of the last message and of how often that message came before, so that requests
may arrive in any order.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from rollway.config.sections import ModelConfig
from rollway.inference.rendering.rendering import SyncRenderer
from rollway.records.task import Message
from rollway.testing.engine import served

Answer = Callable[[str, int], "str | web.Response | dict[str, Any]"]
LOGPROB = -0.5
"""The logprob of every token, if replies have token ids."""


def qwen3(folder: Path) -> ModelConfig:
    """The model that a double with token ids serves, and that is trained."""
    template = {"enable_thinking": False}
    return ModelConfig(path=str(folder), renderer="qwen3", template=template)


class ChatDouble:
    """Keeps all `requests`. `answer` maps the last message, and how often it came before, to a text, a
    message or a response. Requests whose last message `is_held` picks wait for `release`."""

    def __init__(
        self,
        answer: Answer,
        key: str,
        models: tuple[str, ...],
        renderer: SyncRenderer | None,
    ) -> None:
        self._answer = answer
        self._renderer = renderer
        self._key = key
        self._models = models
        self.url = ""
        self.requests: list[dict[str, Any]] = []
        self.num_asked: Counter[str] = Counter()
        """How often each last message came."""
        self.is_held: Callable[[str], bool] = lambda text: False
        self.release = asyncio.Event()
        self.num_held = 0
        self.num_aborted = 0
        self._changed = asyncio.Condition()

    async def until_held(self, count: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self.num_held == count)

    async def _change_held(self, by: int) -> None:
        async with self._changed:
            self.num_held += by
            self._changed.notify_all()

    def _refuse(self, request: web.Request) -> web.Response | None:
        """Return the refusal of a request without the right key."""
        if self._key and request.headers.get("Authorization") != f"Bearer {self._key}":
            return web.json_response({"error": {"message": "who are you?"}}, status=401)
        return None

    async def models(self, request: web.Request) -> web.Response:
        if refusal := self._refuse(request):
            return refusal
        if not self._models:
            return web.Response(status=404)
        return web.json_response(
            {"object": "list", "data": [{"id": model} for model in self._models]}
        )

    async def completions(self, request: web.Request) -> web.Response:
        if refusal := self._refuse(request):
            return refusal
        body = await request.json()
        text: str = body["messages"][-1]["content"]
        num_before = self.num_asked[text]
        self.num_asked[text] += 1
        self.requests.append(body)
        if self.is_held(text):
            await self._hold()
        answer = self._answer(text, num_before)
        if isinstance(answer, web.Response):
            return answer
        message = (
            answer if isinstance(answer, dict) else {"role": "assistant", "content": answer}
        )
        content = message.get("content") or ""
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        if message.get("tool_calls"):
            choice["finish_reason"] = "tool_calls"
        usage = {"prompt_tokens": 7, "completion_tokens": len(content)}
        return web.json_response(
            {"choices": [choice], "usage": usage, **self._add_ids(body, choice)}
        )

    def _add_ids(self, body: dict[str, Any], choice: dict[str, Any]) -> dict[str, Any]:
        """Add the token ids of a reply to its choice, and return those of its prompt, as vLLM does."""
        if self._renderer is None or not body.get("return_token_ids"):
            return {}
        messages = [Message(**message) for message in body["messages"]]
        reply = Message(**choice["message"])
        prompt_ids, ids = self._renderer.split(messages, reply, is_whole=True)
        choice["token_ids"] = ids
        choice["logprobs"] = {"content": [{"token": "", "logprob": LOGPROB} for _ in ids]}
        return {"prompt_token_ids": prompt_ids}

    async def _hold(self) -> None:
        await self._change_held(+1)
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.num_aborted += 1
            raise
        finally:
            await self._change_held(-1)


@asynccontextmanager
async def chat_double(
    answer: Answer,
    key: str = "",
    models: tuple[str, ...] = ("double",),
    renderer: SyncRenderer | None = None,
) -> AsyncIterator[ChatDouble]:
    """Serve on a free port. Without `models` it has no list of models, without `renderer` its replies
    have no token ids."""
    double = ChatDouble(answer, key, models, renderer)
    app = web.Application()
    app.router.add_get("/v1/models", double.models)
    app.router.add_post("/v1/chat/completions", double.completions)
    async with served(app) as url:
        double.url = f"{url}/v1"
        yield double
