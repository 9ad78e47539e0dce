"""Serves `/metrics` on a loop that carries no rollouts. Rendering 20 processes takes 1 ms."""

import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from ..errors import PortError


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
        await web.SockSite(runner, _bound(host, port)).start()
        yield
    finally:
        await runner.cleanup()


def _bound(host: str, port: int) -> socket.socket:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise PortError(
            f"metrics.prometheus_port {port} cannot be bound at {host}: "
            f"{error.strerror or error}; choose another, or 0 for none"
        ) from None
    return sock
