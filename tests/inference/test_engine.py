"""The engine client gives the same turn for every kind of reply, and an error for a wrong one."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pybase64
import pytest
from aiohttp import web
from tests.doubles.chat import chat_double
from tests.doubles.engine import NO_ROUTES, WITH_ROUTES

from rollway.errors import EngineError
from rollway.inference.engines.dialect import Prompt, make_prompt
from rollway.inference.engines.engine import (
    INLINE_JSON_BYTES,
    INLINE_ROUTES_BYTES,
    Engine,
    open_engine,
)
from rollway.inference.engines.link import EngineAccess
from rollway.inference.replies.checks import ReplyRules
from rollway.inference.replies.long_replies import LongReplies
from rollway.inference.replies.routes import encode_npy
from rollway.loop.lanes.lanes import ProcessLane
from rollway.model.shape import ModelShape
from rollway.records.turn import Sampling, Turn
from rollway.testing.engine import served
from rollway.vllm.binary_reply import SAFETENSORS, encode_reply

pytestmark = pytest.mark.anyio

LAYERS, TOPK = 3, 2
Answer = Callable[[web.Request, dict[str, Any]], Awaitable[web.Response]]


@asynccontextmanager
async def serving(answer: Answer, owner: str = "vllm") -> AsyncIterator[str]:
    """A real server that answers completions with `answer`."""

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m", "owned_by": owner}]})

    async def complete(request: web.Request) -> web.Response:
        return await answer(request, await request.json())

    app = web.Application(client_max_size=1 << 30)
    app.router.add_get("/v1/models", models)
    for path in ("/v1/completions", "/generate"):
        app.router.add_post(path, complete)
    async with served(app) as url:
        yield url


def routes_of(positions: int) -> Any:
    return (
        (np.arange(positions * LAYERS * TOPK) % 251)
        .astype(np.uint8)
        .reshape(-1, LAYERS, TOPK)
    )


def vllm_answer(num_drawn: int, *, binary: bool) -> Answer:
    async def answer(request: web.Request, body: dict[str, Any]) -> web.Response:
        ids = [n % 1000 for n in range(num_drawn)]
        logprobs = [-n / 1024 for n in range(num_drawn)]
        start = body["routed_experts_prompt_start"]
        routes = routes_of(len(body["prompt"]) + num_drawn - 1)[start:]
        if binary:
            assert SAFETENSORS in request.headers["Accept"]
            reply = encode_reply(ids, logprobs, [4] * num_drawn, "stop", routes)
            return web.Response(body=reply, content_type=SAFETENSORS)
        choice = {
            "finish_reason": "stop", "token_ids": ids, "logprobs": {"token_logprobs": logprobs},
            "token_versions": [4] * num_drawn, "routed_experts": encode_npy(routes),
        }  # fmt: skip
        return web.json_response({"choices": [choice]})

    return answer


async def draw_turn(
    url: str, num_prompt: int, start: int, rules: ReplyRules = WITH_ROUTES, **options: Any
) -> Turn:
    async with open_engine(EngineAccess(url, deadline_s=30), rules, **options) as engine:
        return await engine.complete(prompt_of(num_prompt), Sampling(1 << 20), [], start)


def prompt_of(num_tokens: int) -> Prompt:
    return make_prompt(np.arange(num_tokens, dtype=np.int32))


@pytest.mark.parametrize("num_prompt", [10, INLINE_ROUTES_BYTES // LAYERS // TOPK])
async def test_binary_and_json_replies_give_the_same_turn(num_prompt: int) -> None:
    turns = []
    for binary in (True, False):
        async with serving(vllm_answer(50, binary=binary)) as url:
            turns.append(await draw_turn(url, num_prompt, start=2))
    for turn in turns:
        assert turn.versions.tolist() == [4] * 50
        assert turn.logprobs.tolist() == [-n / 1024 for n in range(50)]
        assert turn.routes is not None
        assert np.array_equal(turn.routes, routes_of(num_prompt + 49)[2:])
        assert turn.routes_start == 2


async def test_long_replies_are_parsed_by_another_process() -> None:
    count = 60_000
    async with serving(vllm_answer(count, binary=False)) as url, ProcessLane("t", 1) as lane:
        with LongReplies(lane) as long_replies:
            turn = await draw_turn(url, 5, start=0, long_replies=long_replies)
            parsed_here = await draw_turn(url, 5, start=0)
    assert len(json.dumps(turn.logprobs.tolist())) > INLINE_JSON_BYTES
    for name in ("completion_ids", "logprobs", "versions"):
        assert np.array_equal(getattr(turn, name), getattr(parsed_here, name)), name


async def test_the_error_of_a_long_reply_says_what_is_wrong() -> None:
    async def answer(request: web.Request, body: dict[str, Any]) -> web.Response:
        count = 40_000
        choice = {"finish_reason": "stop", "token_ids": [1] * count, "logprobs": None,
                  "text": "x" * INLINE_JSON_BYTES}  # fmt: skip
        return web.json_response({"choices": [choice]})

    async with serving(answer) as url, ProcessLane("t", 1) as lane:
        with (
            LongReplies(lane) as long_replies,
            pytest.raises(EngineError, match="has no logprobs"),
        ):
            await draw_turn(url, 5, start=0, long_replies=long_replies)


async def test_sglang_is_recognised_by_the_owner_of_its_model() -> None:
    async def answer(request: web.Request, body: dict[str, Any]) -> web.Response:
        assert request.path == "/generate"
        routes = routes_of(len(body["input_ids"]) + 1)[body["routed_experts_start_len"] :]
        meta = {
            "finish_reason": {"type": "length"},
            "output_token_logprobs": [[-0.5, 70, None], [-0.25, 71, None]],
            "routed_experts": pybase64.b64encode_as_string(routes.astype(np.int32).tobytes()),
        }
        return web.json_response({"text": "", "meta_info": meta})

    shape = ModelShape(num_layers=LAYERS, topk=TOPK, num_experts=256)
    async with serving(answer, owner="sglang") as url:
        turn = await draw_turn(
            url, 10, start=4, rules=ReplyRules(wants_routes=True, shape=shape)
        )
    assert turn.completion_ids.tolist() == [70, 71]
    assert np.array_equal(turn.routes, routes_of(11)[4:])  # type: ignore[arg-type]


async def test_an_error_says_what_is_wrong_with_the_answer() -> None:
    async def answer(request: web.Request, body: dict[str, Any]) -> web.Response:
        return web.json_response({"error": {"message": "prompt too long"}}, status=400)

    async with serving(answer) as url:
        with pytest.raises(EngineError, match="HTTP 400: prompt too long"):
            await draw_turn(url, 5, start=0)

    async def without_routes(request: web.Request, body: dict[str, Any]) -> web.Response:
        choice = {
            "finish_reason": "stop",
            "token_ids": [1],
            "logprobs": {"token_logprobs": [0.0]},
        }
        return web.json_response({"choices": [choice]})

    async with serving(without_routes) as url:
        with pytest.raises(
            EngineError,
            match=r"SGLang with --enable-return-routed-experts, or set engine\.routes = false",
        ):
            await draw_turn(url, 5, start=0)

    async def broken(request: web.Request, body: dict[str, Any]) -> web.Response:
        return web.Response(body=b"\x08" + bytes(30), content_type=SAFETENSORS)

    async with serving(broken) as url:
        with pytest.raises(EngineError, match="binary reply cannot be read"):
            await draw_turn(url, 5, start=0)


async def test_a_slow_large_body_does_not_hold_up_the_others() -> None:
    """A large body that stops half way keeps its buffer, and the other bodies share the second one."""
    may_continue = asyncio.Event()

    async def answer(request: web.Request, body: dict[str, Any]) -> web.Response:
        reply = await vllm_answer(50, binary=True)(request, body)
        if len(body["prompt"]) == 20_001:
            response = web.StreamResponse(headers={"Content-Type": SAFETENSORS})
            response.content_length = len(reply.body)  # type: ignore[arg-type]
            await response.prepare(request)
            await response.write(reply.body[:70_000])  # type: ignore[index]
            await may_continue.wait()
            await response.write(reply.body[70_000:])  # type: ignore[index]
            return response  # type: ignore[return-value]
        return reply

    async with (
        serving(answer) as url,
        open_engine(EngineAccess(url, deadline_s=30), WITH_ROUTES) as engine,
    ):
        slow = asyncio.create_task(complete(engine, 20_001))
        for _ in range(3):
            await complete(engine, 20_000)
        may_continue.set()
        assert len((await slow).completion_ids) == 50


async def complete(engine: Engine, num_prompt: int) -> Turn:
    return await engine.complete(prompt_of(num_prompt), Sampling(50), [], 0)


async def test_the_model_is_chosen_by_name_and_the_key_is_sent() -> None:
    async with chat_double(
        lambda text, num_before: text, key="sesame", models=("a", "b")
    ) as double:
        for name, expected in (("", "a"), ("b", "b")):
            access = EngineAccess(double.url, 5, name, "sesame")
            async with open_engine(access, NO_ROUTES) as engine:
                assert engine.model == expected
        with pytest.raises(EngineError, match=r"no model 'c' at .* \(it serves a, b\)"):
            await open_engine(
                EngineAccess(double.url, 5, "c", "sesame"), NO_ROUTES
            ).__aenter__()
        with pytest.raises(EngineError, match="HTTP 401: who are you"):
            await open_engine(EngineAccess(double.url, 5), NO_ROUTES).__aenter__()


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda: web.Response(text="<h1>Welcome</h1>", content_type="text/html"),
         r"not a completion: .*It is 'text/html.*may be another server than an engine"),
        (lambda: web.Response(body=b"{}", headers={"Content-Encoding": "gzip"}),
         r"the reply is compressed \('gzip'\), which was not asked for"),
        (lambda: web.Response(status=307, headers={"Location": "http://me:secret@other.test"}),
         r"HTTP 307: .*; it redirects to http://\*\*\*@other.test.*: name that address instead"),
    ],
)  # fmt: skip
async def test_what_answers_like_no_engine_is_said(
    answer: Callable[[], web.Response], said: str
) -> None:
    async def reply(request: web.Request, body: dict[str, Any]) -> web.Response:
        return answer()

    async with serving(reply) as url:
        access = EngineAccess(url, 60)
        async with open_engine(access, ReplyRules(wants_routes=False)) as engine:
            prompt = make_prompt(np.arange(4, dtype=np.int32))
            with pytest.raises(EngineError, match=said):
                await engine.complete(prompt, Sampling(4), [], 0)


async def chunked(request: web.Request, body: bytes, kind: str) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": kind})
    response.enable_chunked_encoding()
    await response.prepare(request)
    await response.write(body)
    return response


async def until_closed(request: web.Request, body: bytes, kind: str) -> web.StreamResponse:
    """The body ends with its connection, as old servers and some proxies do it."""
    assert request.transport is not None
    request.transport.write(
        f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\n\r\n".encode() + body
    )
    request.transport.close()
    return web.Response()


@pytest.mark.parametrize("send", [chunked, until_closed])
@pytest.mark.parametrize("kind", ["application/json", SAFETENSORS])
async def test_a_reply_without_length_that_is_larger_than_any_right_one_is_refused(
    send: Callable[[web.Request, bytes, str], Awaitable[Any]], kind: str
) -> None:
    rules = ReplyRules(wants_routes=False, shape=ModelShape(num_layers=2, vocab_size=1000))
    limit = rules.most_bytes(10)
    choice = {
        "finish_reason": "stop",
        "token_ids": [1],
        "logprobs": {"token_logprobs": [-0.5]},
    }
    padding = 0

    async def answer(request: web.Request, body: dict[str, Any]) -> web.Response:
        if kind == SAFETENSORS:
            # without routes in the rules they are no more than padding
            routes = np.zeros((padding // 6, LAYERS, TOPK), np.uint8)
            whole = encode_reply([1], [-0.5], [4], "stop", routes)
        else:
            whole = json.dumps({"choices": [choice], "padding": "x" * padding}).encode()
        return await send(request, whole, kind)  # type: ignore[no-any-return]

    async with (
        serving(answer) as url,
        open_engine(EngineAccess(url, deadline_s=30), rules) as engine,
    ):
        prompt = prompt_of(6)
        turn = await engine.complete(prompt, Sampling(4), [], 0)
        assert turn.completion_ids.tolist() == [1]
        padding = limit
        with pytest.raises(EngineError, match=f"its reply has more than {limit} bytes"):
            await engine.complete(prompt, Sampling(4), [], 0)
