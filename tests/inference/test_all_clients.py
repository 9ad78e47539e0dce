"""What holds for every client of an endpoint, against a real server that keeps the requests."""

import base64
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from tests.doubles.engine import NO_ROUTES

from rollway import Judge
from rollway.config.credentials import VARIABLE
from rollway.inference.chat.client import ChatClient
from rollway.inference.engines.control import open_control
from rollway.inference.engines.dialect import make_prompt
from rollway.inference.engines.engine import open_engine
from rollway.inference.engines.link import EngineAccess
from rollway.records.task import Message
from rollway.records.turn import Sampling
from rollway.testing.engine import served

pytestmark = pytest.mark.anyio

REPLIES: dict[str, Any] = {
    "/v1/models": {"data": [{"id": "m", "owned_by": "vllm"}]},
    "/v1/completions": {
        "choices": [
            {
                "finish_reason": "stop",
                "token_ids": [1],
                "logprobs": {"token_logprobs": [-0.5]},
            }
        ]
    },
    "/v1/chat/completions": {"choices": [{"message": {"content": "hello"}}]},
    "/weight_info": {"weight_version": "3"},
    "/pause": {},
    "/resume": {},
}


async def use_engine(url: str) -> None:
    async with open_engine(EngineAccess(url, deadline_s=30), NO_ROUTES) as engine:
        prompt = make_prompt(np.arange(4, dtype=np.int32))
        turn = await engine.complete(prompt, Sampling(4), [], 0)
        assert turn.completion_ids.tolist() == [1]


async def use_control(url: str) -> None:
    async with open_control(EngineAccess(url, deadline_s=30)) as control:
        assert await control.weight_version() == "3"
        await control.pause_and_resume()


async def use_chat(url: str) -> None:
    async with ChatClient(url, "m") as chat:
        await chat.check()
        assert (await chat.complete([Message("user", "hi")], Sampling(4))).content == "hello"


async def use_judge(url: str) -> None:
    assert await Judge(url, "m", key_var="NO_SUCH_KEY").ask("hi") == "hello"


Use = Callable[[str], Awaitable[None]]


@asynccontextmanager
async def endpoint(
    keep: Callable[[web.Request], None], *, compresses: bool = False
) -> AsyncIterator[str]:
    """An engine and a chat endpoint at one address."""

    async def answer(request: web.Request) -> web.Response:
        keep(request)
        response = web.json_response(REPLIES[request.path])
        if compresses:
            response.enable_compression(web.ContentCoding.gzip)
        return response

    app = web.Application()
    for path in REPLIES:
        app.router.add_route("*", path, answer)
    async with served(app) as url:
        yield url


@pytest.mark.parametrize(
    ("use", "paths"),
    [
        (use_engine, {"/v1/models", "/v1/completions"}),
        (use_control, {"/v1/models", "/weight_info", "/pause", "/resume"}),
        (use_chat, {"/v1/models", "/v1/chat/completions"}),
        (use_judge, {"/v1/chat/completions"}),
    ],
)
async def test_the_password_in_a_url_comes_with_every_request(
    use: Use, paths: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "{}")
    proofs: set[tuple[str, str]] = set()

    def keep(request: web.Request) -> None:
        proofs.add((request.path, request.headers.get("Authorization", "none")))

    async with endpoint(keep) as url:
        await use(url.replace("http://", "http://me:p%40ss@"))
    expected = f"Basic {base64.b64encode(b'me:p@ss').decode()}"
    assert proofs == {(path, expected) for path in paths}


@pytest.mark.parametrize("use", [use_control, use_chat, use_judge])
async def test_small_replies_may_be_compressed(use: Use) -> None:
    """A proxy in front of a judge may compress. The client for large replies does not unpack."""
    offered: set[bool] = set()

    def keep(request: web.Request) -> None:
        offered.add("gzip" in request.headers.get("Accept-Encoding", ""))

    async with endpoint(keep, compresses=True) as url:
        await use(url)
    assert offered == {True}
