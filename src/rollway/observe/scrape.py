"""Serves `/metrics` on a loop that carries no rollouts. Rendering 20 processes takes 1 ms."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from ..loop.port import claimed


@asynccontextmanager
async def scrapable(host: str, port: int, render: Callable[[], bytes]) -> AsyncIterator[None]:
    """Bind at once, or say which key to change; port 0 serves nothing."""
    if not port:
        yield
        return

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=render(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.SockSite(runner, claimed("metrics.prometheus_port", host, port, zero="none")).start()
        yield
    finally:
        await runner.cleanup()
