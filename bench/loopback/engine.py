"""A loopback engine: answers every request after a fixed latency with a body prepared beforehand."""

import asyncio
import json
from functools import cache
from multiprocessing.connection import Connection

import msgspec
import numpy as np
from aiohttp import web

from rollway.inference.routes import encode_npy

LATENCY_S = 0.05


class Asked(msgspec.Struct):
    """What of a request decides how many positions are routed."""

    prompt: list[int]
    routed_experts_prompt_start: int | None = None


@cache
def reply(positions: int, shape: tuple[int, int], drawn: int) -> bytes:
    choice = {
        "finish_reason": "length",
        "token_ids": [7] * drawn,
        "logprobs": {"token_logprobs": [-0.5] * drawn},
        "routed_experts": encode_npy(np.ones((positions, *shape), np.uint8)),
    }
    return json.dumps({"choices": [choice]}).encode()


def serve(pipe: Connection, shape: tuple[int, int], drawn: int, full_routes: bool) -> None:
    """Serve on a free port, which goes down the pipe; `shape` is layers × slots of a token's routes."""
    decoder = msgspec.json.Decoder(Asked)

    async def complete(request: web.Request) -> web.Response:
        asked = decoder.decode(await request.read())
        start = 0 if full_routes else asked.routed_experts_prompt_start or 0
        await asyncio.sleep(LATENCY_S)
        body = reply(len(asked.prompt) + drawn - 1 - start, shape, drawn)
        return web.Response(body=body, content_type="application/json")

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "bench"}]})

    async def main() -> None:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/v1/completions", complete)
        app.router.add_get("/v1/models", models)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
        pipe.send(runner.addresses[0][1])
        await asyncio.Event().wait()

    asyncio.run(main())
