"""A proxy in front of a real engine that changes some of its replies, chosen by what was asked."""

import base64
import io
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import aiohttp
import numpy as np
from aiohttp import web

from tests.doubles.stand_ins import Background, background

Choice = dict[str, Any]
Poison = Callable[[Choice], None]
ONE_OF = 3
"""Of this many requests, one gets a changed reply."""


def read_routes(choice: Choice) -> np.ndarray[Any, Any]:
    routes: np.ndarray[Any, Any] = np.load(
        io.BytesIO(base64.b64decode(choice["routed_experts"]))
    )
    return routes


def write_routes(choice: Choice, routes: np.ndarray[Any, Any]) -> None:
    file = io.BytesIO()
    np.save(file, np.ascontiguousarray(routes))
    choice["routed_experts"] = base64.b64encode(file.getvalue()).decode()


class PoisoningProxy:
    """Passes everything on. A completion is changed by one of `poisons`, if its prompt says so."""

    def __init__(self, target: str, poisons: dict[str, Poison]) -> None:
        self._target = target
        self._poisons = [*poisons.items()]
        self.used: Counter[str] = Counter()
        """How often each poison was given."""
        self.url = ""

    async def start(self) -> None:
        self._session = aiohttp.ClientSession(auto_decompress=False)
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"

    async def stop(self) -> None:
        await self._runner.cleanup()
        await self._session.close()

    async def _pass_on(self, request: web.Request) -> web.Response:
        body = await request.read()
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        url = self._target + str(request.rel_url)
        async with self._session.request(
            request.method, url, data=body, headers=headers
        ) as reply:
            if request.path != "/v1/completions" or reply.status != 200:
                return web.Response(
                    body=await reply.read(),
                    status=reply.status,
                    content_type=reply.content_type,
                )
            answer = await reply.json()
        self._poison(answer["choices"][0], (await request.json())["prompt"])
        return web.json_response(answer)

    def _poison(self, choice: Choice, prompt: list[int]) -> None:
        number = zlib.crc32(bytes(np.array(prompt, np.int32)))
        if number % ONE_OF == 0:
            name, poison = self._poisons[number // ONE_OF % len(self._poisons)]
            poison(choice)
            self.used[name] += 1


@contextmanager
def poisoning_proxy(target: str, poisons: dict[str, Poison]) -> Iterator[PoisoningProxy]:
    proxy = PoisoningProxy(target, poisons)
    loop: Background
    with background() as loop:
        loop.run(proxy.start())
        try:
            yield proxy
        finally:
            loop.run(proxy.stop())
