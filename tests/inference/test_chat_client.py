"""The chat client against a real server: what it sends, how it reads answers, how long it waits."""

import asyncio
from datetime import UTC, datetime
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from tests.doubles.chat import LOGPROB, Answer, ChatDouble, chat_double, qwen3

from rollway.errors import ContextFull, EngineError
from rollway.inference.chat.client import ChatClient, ChatReply
from rollway.inference.rendering.rendering import SyncRenderer
from rollway.inference.rendering.tokenizer import Tokenizer
from rollway.records.task import CalledFunction, Message, ToolCall
from rollway.records.turn import Sampling
from rollway.testing.engine import served

pytestmark = pytest.mark.anyio

HOT = Sampling(50, 0.7, 0.9)
HI = [Message("system", "be brief"), Message("user", "hi")]


def shout(text: str, num_before: int) -> str:
    return text.upper()


async def error_of(answer: Any, **client: Any) -> str:
    """Return the client's error for an endpoint that gives this answer."""
    async with chat_double(answer) as double:
        async with ChatClient(double.url, "double", **client) as chat:
            with pytest.raises(EngineError) as caught:
                await chat.complete(HI, HOT)
        assert str(caught.value).startswith(f"{double.url}/chat/completions: ")
        return str(caught.value)


async def test_the_client_sends_messages_and_returns_a_reply() -> None:
    async with chat_double(shout) as double:
        async with ChatClient(double.url, "double") as chat:
            await chat.check()
            reply = await chat.complete(HI, HOT)
            assert reply == ChatReply("HI", None, (), "stop", 7, 2)
        assert double.requests == [
            {
                "model": "double",
                "messages": [
                    {"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}
                ],
                "max_tokens": 50, "temperature": 0.7, "top_p": 0.9,
                "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0,
            }
        ]  # fmt: skip


async def test_the_reasoning_of_earlier_replies_is_sent_back() -> None:
    async with chat_double(shout) as double:
        async with ChatClient(double.url, "double") as chat:
            await chat.complete(
                [*HI, Message("assistant", "so", "hm"), Message("user", "why?")], HOT
            )
        assert double.requests[0]["messages"][2:] == [
            {"role": "assistant", "content": "so", "reasoning_content": "hm"},
            {"role": "user", "content": "why?"},
        ]


async def test_v1_is_added_to_a_url_without_a_path() -> None:
    async with (
        chat_double(shout) as double,
        ChatClient(double.url.removesuffix("v1"), "double") as chat,
    ):
        assert chat.url == double.url
        assert (await chat.complete(HI, HOT)).content == "HI"


async def test_a_reply_may_have_tool_calls_and_reasoning_and_no_content() -> None:
    call = {
        "id": "c1",
        "type": "function",
        "function": {"name": "add", "arguments": '{"a": 1}'},
    }
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    message = {
        "role": "assistant",
        "content": None,
        "reasoning_content": "hm",
        "tool_calls": [call],
    }
    async with chat_double(lambda *_: message) as double:
        async with ChatClient(double.url, "double") as chat:
            reply = await chat.complete(HI, HOT, [tool])
        assert double.requests[0]["tools"] == [tool]
    assert reply == ChatReply(
        "", "hm", (ToolCall("c1", CalledFunction("add", '{"a": 1}')),), "tool_calls", 7, 0
    )


async def test_the_key_is_sent_and_never_appears_in_an_error() -> None:
    async with chat_double(shout, key="sesame") as double:
        async with ChatClient(double.url, "double", "sesame") as chat:
            await chat.check()
            await chat.complete(HI, HOT)
        for key in ("", "open"):
            async with ChatClient(double.url, "double", key) as chat:
                with pytest.raises(EngineError, match="HTTP 401: who are you") as caught:
                    await chat.check()
                assert "open" not in str(caught.value)
                with pytest.raises(EngineError, match="HTTP 401: who are you"):
                    await chat.complete(HI, HOT)
    with pytest.raises(EngineError, match="Authorization is not one line") as caught:
        ChatClient("http://localhost", "m", "se\nsame")
    assert "same" not in str(caught.value)


async def test_a_model_that_the_endpoint_does_not_list_is_an_error() -> None:
    async with (
        chat_double(shout, models=("qwen3-8b", "qwen3-32b")) as double,
        ChatClient(double.url, "qwen-8b") as chat,
    ):
        with pytest.raises(
            EngineError, match=r"no model 'qwen-8b' at .*; did you mean 'qwen3-8b'\?"
        ):
            await chat.check()


async def test_an_endpoint_without_a_list_of_models_is_accepted() -> None:
    async with (
        chat_double(shout, models=()) as double,
        ChatClient(double.url, "whatever") as chat,
    ):
        await chat.check()
        assert chat.model == "whatever"


async def test_an_endpoint_that_does_not_exist_is_an_error() -> None:
    async with ChatClient("http://127.0.0.1:1/v1", "m") as chat:
        with pytest.raises(
            EngineError, match=r"no endpoint at http://127\.0\.0\.1:1/v1: cannot connect"
        ):
            await chat.check()
        with pytest.raises(EngineError, match="completions: cannot connect"):
            await chat.complete(HI, HOT)
    with pytest.raises(EngineError, match="'localhost:8000' is not the address"):
        ChatClient("localhost:8000", "m")


@pytest.mark.parametrize("after", ["0", "0.05", None, "date"])
async def test_a_busy_endpoint_is_asked_again(after: str | None) -> None:
    when = format_datetime(datetime.now(UTC), usegmt=True) if after == "date" else after

    def busy(text: str, num_before: int) -> str | web.Response:
        if num_before == 2:
            return "now"
        headers = {} if when is None else {"Retry-After": when}
        return web.Response(status=(429, 503)[num_before], headers=headers)

    async with chat_double(busy) as double:
        async with ChatClient(double.url, "double") as chat:
            assert (await chat.complete(HI, HOT)).content == "now"
        assert double.num_asked["hi"] == 3


async def test_a_pause_beyond_the_deadline_is_an_error_at_once() -> None:
    full = web.json_response(
        {"error": {"message": "full"}}, status=429, headers={"Retry-After": "99"}
    )
    error = await error_of(lambda *_: full, deadline_s=30)
    assert "HTTP 429: full; asking again in 99.0 s would pass the deadline of 30 s" in error


async def test_at_the_deadline_the_client_closes_the_connection_to_a_slow_endpoint() -> None:
    async with chat_double(shout) as double:
        double.is_held = lambda text: True
        async with ChatClient(double.url, "double", deadline_s=1) as chat:
            with pytest.raises(EngineError, match=r"no reply within 1 s"):
                await chat.complete(HI, HOT)
        await double.until_held(0)
        assert double.num_aborted == 1


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (lambda: web.Response(text="{not json"), "not a chat completion"),
        (lambda: web.json_response({"choices": []}), "not a chat completion"),
        (
            lambda: web.Response(body=b'{"choices": [{"message": {"content": "\x80"}}]}'),
            "not a chat completion",
        ),
        (
            lambda: web.json_response({"error": {"message": "no credit left"}}),
            "no credit left",
        ),
        (
            lambda: web.json_response({"error": {"message": "too long"}}, status=400),
            "HTTP 400: too long",
        ),
        (lambda: web.Response(status=500, text="oh"), "HTTP 500: oh"),
        (lambda: web.Response(body=bytes(9 << 20)), "has a body of more than"),
    ],
)
async def test_an_answer_that_is_not_a_reply_is_an_error(response: Any, message: str) -> None:
    assert message in await error_of(lambda *_: response())


async def test_a_parameter_that_the_endpoint_refuses_is_left_out_from_then_on() -> None:
    """Reasoning models take `max_completion_tokens`, and only the default sampling."""
    accepted = {"model", "messages", "max_completion_tokens"}
    async with chat_double(shout) as double:

        def picky(text: str, num_before: int) -> str | web.Response:
            refused = sorted(set(double.requests[-1]) - accepted)
            if not refused:
                return "fine"
            error = {"message": f"Unsupported parameter: '{refused[0]}'", "param": refused[0]}
            return web.json_response({"error": error}, status=400)

        double._answer = picky
        async with ChatClient(double.url, "double") as chat:
            assert (await chat.complete(HI, Sampling(50))).content == "fine"
            assert double.num_asked["hi"] == 7
            assert (await chat.complete(HI, Sampling(50))).content == "fine"
            assert double.num_asked["hi"] == 8
        async with ChatClient(double.url, "double") as chat:
            with pytest.raises(EngineError, match="Unsupported parameter: 'temperature'"):
                await chat.complete(HI, HOT)


async def test_parameters_that_an_endpoint_does_not_know_are_left_out_together() -> None:
    async with chat_double(shout) as double:

        def unknowing(text: str, num_before: int) -> str | web.Response:
            unknown = {"top_k", "min_p", "repetition_penalty"} & set(double.requests[-1])
            if not unknown:
                return "fine"
            names = ", ".join(sorted(unknown))
            error = {"message": f"Unrecognized request arguments supplied: {names}"}
            return web.json_response({"error": error}, status=400)

        double._answer = unknowing
        async with ChatClient(double.url, "double") as chat:
            assert (await chat.complete(HI, HOT)).content == "fine"
    assert [len(request) for request in double.requests] == [8, 5]


async def test_token_ids_are_asked_for_and_may_be_missing() -> None:
    async with chat_double(shout) as double, ChatClient(double.url, "double") as chat:
        await chat.ask_for_ids(HI, [1])
        assert double.requests[-1]["return_token_ids"]
        assert (await chat.complete(HI, HOT)).tokens is None
        assert "return_token_ids" not in double.requests[-1], "it returned none"

        def strict(text: str, num_before: int) -> str | web.Response:
            if "return_token_ids" in double.requests[-1]:
                error = {"message": "Unrecognized request argument: return_token_ids"}
                return web.json_response({"error": error}, status=400)
            return "fine"

        double._answer = strict
        async with ChatClient(double.url, "double") as chat:
            await chat.ask_for_ids(HI, [1])
            assert (await chat.complete(HI, HOT)).content == "fine"


async def test_token_ids_of_a_reply(tiny_moe: Path) -> None:
    renderer, tokenizer = SyncRenderer(qwen3(tiny_moe)), Tokenizer(str(tiny_moe))
    async with (
        chat_double(shout, renderer=renderer) as double,
        ChatClient(double.url, "double") as chat,
    ):
        await chat.ask_for_ids(HI, renderer.prompt(HI))
        tokens = (await chat.complete(HI, HOT)).tokens
        assert tokens is not None
        assert tokens.prompt_ids == renderer.prompt(HI)
        assert tokenizer.decode(tokens.completion_ids) == "HI<|im_end|>"
        assert tokens.logprobs == [LOGPROB] * len(tokens.completion_ids)
        await chat.ask_for_ids(HI, [1, 2, 3])
        assert (await chat.complete(HI, HOT)).tokens is None, "it has other ids"


async def test_an_aborted_reply_is_asked_for_again() -> None:
    def abort_first(text: str, num_before: int) -> str | web.Response:
        if num_before:
            return "whole"
        message = {"role": "assistant", "content": "who"}
        choice = {"message": message, "finish_reason": "abort"}
        return web.json_response({"choices": [choice]})

    async with chat_double(abort_first) as double, ChatClient(double.url, "double") as chat:
        assert (await chat.complete(HI, HOT)).content == "whole"


WINDOW = 20


def narrow(double: ChatDouble) -> Answer:
    """Answer like an endpoint with a window of WINDOW tokens, in which a message has as many tokens as
    characters."""

    def answer(text: str, num_before: int) -> web.Response:
        max_tokens = double.requests[-1]["max_tokens"]
        if len(text) + max_tokens > WINDOW:
            message = (
                f"This model's maximum context length is {WINDOW} tokens. However, you requested "
                f"{max_tokens} output tokens and your prompt contains at least {WINDOW} tokens."
            )
            return web.json_response({"error": {"message": message}}, status=400)
        choice = {
            "message": {"role": "assistant", "content": "x" * max_tokens},
            "finish_reason": "length",
        }
        usage = {"prompt_tokens": len(text), "completion_tokens": max_tokens}
        return web.json_response({"choices": [choice], "usage": usage})

    return answer


async def test_a_reply_gets_the_room_that_is_left_and_a_full_context_is_named() -> None:
    async with chat_double(shout) as double:
        double._answer = narrow(double)
        async with ChatClient(double.url, "double") as chat:
            reply = await chat.complete([Message("user", "a" * 14)], Sampling(10))
            assert (reply.content, reply.finish_reason) == ("x" * 6, "length")
            assert chat.max_context == WINDOW, "the error has named it"
            reply = await chat.complete([Message("user", "b" * 19)], Sampling(10))
            assert reply.content == "x"
            with pytest.raises(ContextFull, match="maximum context length is 20 tokens"):
                await chat.complete([Message("user", "c" * 20)], Sampling(10))
    assert [request["max_tokens"] for request in double.requests] == [10, 1, 6, 10, 1, 10, 1]


async def test_many_requests_at_once_each_get_their_own_reply() -> None:
    async with chat_double(shout) as double, ChatClient(double.url, "double") as chat:
        requests = [chat.complete([Message("user", f"n{n}")], HOT) for n in range(50)]
        replies = await asyncio.gather(*requests)
        assert [reply.content for reply in replies] == [f"N{n}" for n in range(50)]


async def test_a_list_of_models_in_an_unknown_shape_is_ignored() -> None:
    async def bare_list(request: web.Request) -> web.Response:
        return web.json_response([{"id": "x"}])

    app = web.Application()
    app.router.add_get("/v1/models", bare_list)
    async with served(app) as url, ChatClient(url, "whatever") as chat:
        await chat.check()
