"""Binds a port before anything slow is done, so that a port in use is known at once, and serves it."""

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from ...errors import PortError

if TYPE_CHECKING:
    from aiohttp import web

MAX_BACKLOG = 4096


def bind_port(key: str, host: str, port: int | None) -> socket.socket:
    """Return a socket bound to the port that the run file's `key` names; None binds any free port."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port or 0))
    except (OSError, OverflowError) as error:
        sock.close()
        reason = getattr(error, "strerror", None) or "ports go up to 65535"
        raise PortError(
            f"'{key}' = {port} cannot be bound at {host}: {reason}; choose another port"
        ) from None
    return sock


@asynccontextmanager
async def serve_app(
    app: "web.Application", sock: socket.socket, shutdown_s: float = 0.1
) -> AsyncIterator[str]:
    """Serve an app on a bound socket for the length of the block, and yield its address. A client that
    hangs up cancels its request. Requests may still run for `shutdown_s` when the block ends."""
    from aiohttp import web  # only here, because it takes long to import

    runner = web.AppRunner(
        app, handler_cancellation=True, access_log=None, shutdown_timeout=shutdown_s
    )
    await runner.setup()
    try:
        await web.SockSite(runner, sock, backlog=MAX_BACKLOG).start()
        host, port = sock.getsockname()
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()
