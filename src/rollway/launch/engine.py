"""The embedded engine of a run: started again when it dies, at the same address."""

from collections.abc import Awaitable, Callable

import msgspec

from ..config.parts import EnginePart
from ..loop.port import claimed
from .parts import Parts

ENGINE = "rollway.inference.embedded.http:main"
HOST = "127.0.0.1"


async def start_engine(
    parts: Parts, part: EnginePart, again: Callable[[], Awaitable[EnginePart]]
) -> str:
    """Its address, once it serves. The socket is ours: while one engine is gone, requests wait there
    for the next, which `again` describes."""
    sock = parts.hold(claimed("engine.port", HOST, part.engine.port, zero="any"))
    listen_fd = sock.fileno()

    def at_our_socket(one: EnginePart) -> EnginePart:
        return msgspec.structs.replace(one, listen_fd=listen_fd)

    async def renewed() -> EnginePart:
        return at_our_socket(await again())

    engine = await parts.start_lasting("engine", ENGINE, at_our_socket(part), renewed, [listen_fd])
    return await engine.ready()
