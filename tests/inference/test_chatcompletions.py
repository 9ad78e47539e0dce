"""The chat client against a real server: what it asks, what it makes of answers, how it waits."""

import asyncio
from datetime import UTC, datetime
from email.utils import format_datetime
from typing import Any

import msgspec
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from tests.doubles.chat import chat_double

from rollway.errors import EngineError
from rollway.inference.chat.client import ChatClient, ChatReply
from rollway.inference.http.endpoint import LONGEST_PAUSE_S, back_off_s, retry_after_s
from rollway.records.task import CalledFunction, Message, ToolCall
from rollway.records.turn import Sampling
from rollway.testing.engine import served

pytestmark = pytest.mark.anyio

HOT = Sampling(50, 0.7, 0.9)
HI = [Message("system", "be brief"), Message("user", "hi")]


def echo(said: str, nth: int) -> str:
    return said.upper()


async def failing(answer: Any, messages: list[Message] = HI, **client: Any) -> str:
    """What the client says of an endpoint that answers so."""
    async with chat_double(answer) as double:
        with ChatClient(double.url, "double", **client) as chat, pytest.raises(EngineError) as caught:
            await chat.complete(messages, HOT)
        assert str(caught.value).startswith(f"{double.url}/chat/completions: ")
        return str(caught.value)


async def test_messages_in_a_message_out() -> None:
    async with chat_double(echo) as double:
        with ChatClient(double.url, "double") as chat:
            await chat.check()
            drawn = await chat.complete(HI, HOT)
            assert drawn == ChatReply("HI", None, (), "stop", 7, 2)
        assert double.asked == [
            {
                "model": "double",
                "messages": [
                    {"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}
                ],
                "max_tokens": 50, "temperature": 0.7, "top_p": 0.9,
            }
        ]  # fmt: skip


async def test_a_bare_host_means_v1() -> None:
    async with chat_double(echo) as double:
        with ChatClient(double.url.removesuffix("v1"), "double") as chat:
            assert chat.url == double.url
            assert (await chat.complete(HI, HOT)).content == "HI"


async def test_tools_reasoning_and_missing_content() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    said = {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]}
    async with chat_double(lambda *_: said) as double:
        with ChatClient(double.url, "double") as chat:
            drawn = await chat.complete(HI, HOT, [tool])
        assert double.asked[0]["tools"] == [tool]
    assert drawn == ChatReply(
        "", "hm", (ToolCall("c1", CalledFunction("add", '{"a": 1}')),), "tool_calls", 7, 0
    )


async def test_the_key_goes_along_and_never_into_an_error() -> None:
    async with chat_double(echo, key="sesame") as double:
        with ChatClient(double.url, "double", "sesame") as chat:
            await chat.check()
            await chat.complete(HI, HOT)
        for key in ("", "open"):
            with ChatClient(double.url, "double", key) as chat:
                with pytest.raises(EngineError, match="HTTP 401: who are you") as caught:
                    await chat.check()
                assert "open" not in str(caught.value)
                with pytest.raises(EngineError, match="HTTP 401: who are you"):
                    await chat.complete(HI, HOT)
    with pytest.raises(EngineError, match="Authorization is not one line") as caught:
        ChatClient("http://localhost", "m", "se\nsame")
    assert "same" not in str(caught.value)


async def test_a_model_that_is_not_there() -> None:
    async with chat_double(echo, models=("qwen3-8b", "qwen3-32b")) as double:
        with (
            ChatClient(double.url, "qwen-8b") as chat,
            pytest.raises(EngineError, match=r"no model 'qwen-8b' at .*; did you mean 'qwen3-8b'\?"),
        ):
            await chat.check()


async def test_an_endpoint_that_lists_no_models_is_believed() -> None:
    async with chat_double(echo, models=()) as double:
        with ChatClient(double.url, "whatever") as chat:
            await chat.check()
            assert chat.model == "whatever"


async def test_an_endpoint_that_is_not_there() -> None:
    with ChatClient("http://127.0.0.1:1/v1", "m") as chat:
        with pytest.raises(
            EngineError, match=r"no endpoint at http://127\.0\.0\.1:1/v1: cannot connect"
        ):
            await chat.check()
        with pytest.raises(EngineError, match="completions: cannot connect"):
            await chat.complete(HI, HOT)
    with pytest.raises(EngineError, match="'localhost:8000' is not the address"):
        ChatClient("localhost:8000", "m")


@pytest.mark.parametrize("after", ["0", "0.05", None, "date"])
async def test_later_is_asked_again(after: str | None) -> None:
    when = format_datetime(datetime.now(UTC), usegmt=True) if after == "date" else after

    def busy(said: str, nth: int) -> str | web.Response:
        headers = {} if when is None else {"Retry-After": when}
        return web.Response(status=(429, 503)[nth], headers=headers) if nth < 2 else "now"

    async with chat_double(busy) as double:
        with ChatClient(double.url, "double") as chat:
            assert (await chat.complete(HI, HOT)).content == "now"
        assert double.said["hi"] == 3


async def test_later_than_the_deadline_is_an_error_at_once() -> None:
    full = web.json_response({"error": {"message": "full"}}, status=429, headers={"Retry-After": "99"})
    said = await failing(lambda *_: full, deadline_s=30)
    assert "HTTP 429: full; asking again in 99.0 s would pass the deadline of 30 s" in said


async def test_a_slow_endpoint_meets_the_deadline_and_is_hung_up_on() -> None:
    async with chat_double(echo) as double:
        double.is_held = lambda said: True
        with (
            ChatClient(double.url, "double", deadline_s=0.2) as chat,
            pytest.raises(EngineError, match=r"no reply within 0\.2 s"),
        ):
            await chat.complete(HI, HOT)
        await double.until_held(0)
        assert double.num_aborted == 1


@pytest.mark.parametrize(
    ("response", "said"),
    [
        (lambda: web.Response(text="{not json"), "not a chat completion"),
        (lambda: web.json_response({"choices": []}), "not a chat completion"),
        (
            lambda: web.Response(body=b'{"choices": [{"message": {"content": "\x80"}}]}'),
            "not a chat completion",
        ),
        (lambda: web.json_response({"error": {"message": "no credit left"}}), "no credit left"),
        (
            lambda: web.json_response({"error": {"message": "too long"}}, status=400),
            "HTTP 400: too long",
        ),
        (lambda: web.Response(status=500, text="oh"), "HTTP 500: oh"),
        (lambda: web.Response(body=bytes(9 << 20)), "a body of more than"),
    ],
)
async def test_nonsense_is_told(response: Any, said: str) -> None:
    assert said in await failing(lambda *_: response())


async def test_an_endpoint_that_does_not_know_a_parameter_says_so_once() -> None:
    """Reasoning models take `max_completion_tokens`, and no sampling but the default."""
    known = {"model", "messages", "max_completion_tokens"}
    async with chat_double(echo) as double:

        def picky(said: str, nth: int) -> str | web.Response:
            unknown = sorted(set(double.asked[-1]) - known)
            if not unknown:
                return "fine"
            error = {"message": f"Unsupported parameter: '{unknown[0]}'", "param": unknown[0]}
            return web.json_response({"error": error}, status=400)

        double._answer = picky
        with ChatClient(double.url, "double") as chat:
            assert (await chat.complete(HI, Sampling(50))).content == "fine"
            assert double.said["hi"] == 4
            assert (await chat.complete(HI, Sampling(50))).content == "fine"
            assert double.said["hi"] == 5
        with (
            ChatClient(double.url, "double") as chat,
            pytest.raises(EngineError, match="Unsupported parameter: 'temperature'"),
        ):
            await chat.complete(HI, HOT)


async def test_many_at_once() -> None:
    async with chat_double(echo) as double:
        with ChatClient(double.url, "double") as chat:
            asks = [chat.complete([Message("user", f"n{n}")], HOT) for n in range(50)]
            assert [one.content for one in await asyncio.gather(*asks)] == [f"N{n}" for n in range(50)]


@given(st.integers(1, 10_000), st.floats(0, 1))
def test_pauses_grow_to_a_bound(num_refused: int, luck: float) -> None:
    assert 0.25 <= back_off_s(num_refused, luck) <= LONGEST_PAUSE_S
    assert back_off_s(num_refused, luck) <= back_off_s(num_refused + 1, luck)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("3", 3.0), ("0.5", 0.5), ("-1", 0.0), ("", None), ("soon", None),
     ("Wed, 21 Oct 2026 07:28:30 GMT", 30.0), ("Wed, 21 Oct 2026 07:27:00 GMT", 0.0)],
)  # fmt: skip
def test_retry_after_is_a_number_or_a_date(text: str, seconds: float | None) -> None:
    now = datetime(2026, 10, 21, 7, 28, tzinfo=UTC)
    assert retry_after_s({"retry-after": text}, now) == seconds


def test_a_conversation_is_sent_as_it_was() -> None:
    sent = msgspec.json.decode(msgspec.json.encode([Message("assistant", "so", "hm")]))
    assert sent == [{"role": "assistant", "content": "so", "reasoning_content": "hm"}]


async def test_a_list_of_models_in_a_shape_of_its_own_is_as_good_as_none() -> None:
    async def bare(request: web.Request) -> web.Response:
        return web.json_response([{"id": "x"}])

    app = web.Application()
    app.router.add_get("/v1/models", bare)
    async with served(app) as url:
        with ChatClient(url, "whatever") as chat:
            await chat.check()
