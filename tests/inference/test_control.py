"""The control of one engine, against real servers: loading weights, and asking for load and version."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from rollway.errors import EngineAway, EngineError, EngineLate
from rollway.inference.engines.control import EngineControl, open_control
from rollway.inference.engines.link import EngineAccess
from rollway.testing.engine import served

pytestmark = pytest.mark.anyio

Answer = Callable[[web.Request], web.Response]


class Server:
    """A control, and the bodies of the calls that its server received, by path and in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.control: EngineControl

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self.calls]


@asynccontextmanager
async def controlled(answer: Answer, owner: str = "vllm") -> AsyncIterator[Server]:
    """A real server that lists one model and gives `answer` to every other request."""
    server = Server()

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m", "owned_by": owner}]})

    async def handle(request: web.Request) -> web.Response:
        server.calls.append((request.path, json.loads(await request.text() or "{}")))
        return answer(request)

    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_route("*", "/{path:.*}", handle)
    async with (
        served(app) as url,
        open_control(EngineAccess(url, deadline_s=30)) as server.control,
    ):
        yield server


def accept(request: web.Request) -> web.Response:
    return web.json_response({"success": True})


def refuse(request: web.Request) -> web.Response:
    return web.json_response({"success": False, "message": "no such folder"})


async def test_weights_are_loaded_while_decoding_is_paused() -> None:
    async with controlled(accept, owner="sglang") as server:
        await server.control.load_weights("/weights/v3", 3)
        await server.control.confirm(3)
    assert server.paths == [
        "/pause_generation",
        "/update_weights_from_disk",
        "/continue_generation",
        "/update_weight_version",
    ]
    assert server.calls[1][1] == {"model_path": "/weights/v3", "flush_cache": True}
    assert server.calls[3][1] == {"new_version": "3", "abort_all_requests": False}


async def test_an_engine_that_answers_while_it_is_paused_continues_when_it_is_confirmed() -> (
    None
):
    async with controlled(accept, owner="rollway") as server:
        await server.control.load_weights("/weights/v3", 3)
        assert "/resume" not in server.paths
        await server.control.confirm(3)
    assert server.paths[-2:] == ["/update_weight_version", "/resume"]


@pytest.mark.parametrize("text", ["<html>Welcome</html>", "ok", "[1]"])
async def test_an_answer_that_is_not_that_of_an_engine_is_no_success(text: str) -> None:
    async with controlled(lambda request: web.Response(text=text)) as server:
        with pytest.raises(EngineError, match="the answer is not that of an engine"):
            await server.control.load_weights("/weights", 3)


async def test_an_engine_whose_load_failed_stays_paused() -> None:
    """It may have a broken model: the next request would make it die."""
    async with controlled(refuse, owner="sglang") as server:
        with pytest.raises(EngineError, match="no such folder"):
            await server.control.load_weights("/none", 3)
    assert server.paths == ["/pause_generation"]


async def test_a_probe_of_sglang_is_asked_for_and_read() -> None:
    reply = [
        {
            "meta_info": {
                "input_token_logprobs": [[None, 5, None], [-1.5, 6, None], [-0.25, 7, None]],
                "output_token_logprobs": [[-0.5, 9, None]],
            }
        }
    ]
    async with controlled(lambda _: web.json_response(reply), owner="sglang") as server:
        (answer,) = await server.control.probe([(5, 6, 7)])
    assert server.calls[0][0] == "/generate"
    assert server.calls[0][1]["input_ids"] == [[5, 6, 7]]
    assert server.calls[0][1]["logprob_start_len"] == 0
    assert (answer.logprobs, answer.top_logprob) == ((-1.5, -0.25), -0.5)


async def test_an_engine_that_does_not_know_the_path_reports_nothing() -> None:
    async with controlled(lambda request: web.Response(status=404)) as server:
        assert await server.control.load() is None
        assert await server.control.weight_version() == ""


async def test_only_the_status_of_an_answer_decides_that_the_path_is_unknown() -> None:
    """The text of another error may mention HTTP 404, for example that of a server behind a proxy."""
    broken = "the backend answered HTTP 404: not found"
    async with controlled(lambda request: web.Response(status=500, text=broken)) as server:
        with pytest.raises(
            EngineAway, match="HTTP 500: the backend answered HTTP 404"
        ) as caught:
            await server.control.load()
        assert caught.value.status == 500
        with pytest.raises(EngineAway):
            await server.control.weight_version()


def choice(**fields: Any) -> dict[str, Any]:
    return {"index": 0, "logprobs": {"token_logprobs": [-1.0]}, **fields}


async def test_a_probe_that_is_always_aborted_counts_as_a_late_answer() -> None:
    aborted = choice(finish_reason="abort", logprobs={"token_logprobs": []})
    async with controlled(lambda _: web.json_response({"choices": [aborted]})) as server:
        with pytest.raises(EngineLate, match="aborted 5 times"):
            await server.control.probe([[1, 2]])
        assert server.paths == ["/v1/completions"] * 5


async def test_logprobs_that_are_not_numbers_are_named() -> None:
    text = "Out of range float values are not JSON compliant"

    def refuse_nan(request: web.Request) -> web.Response:
        return web.json_response({"error": {"message": text}}, status=400)

    async with controlled(refuse_nan) as server:
        with pytest.raises(EngineError, match="not numbers: its weights are damaged"):
            await server.control.probe([[1, 2]])
