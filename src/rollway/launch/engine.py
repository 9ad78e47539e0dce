"""The embedded engine of a run: started again when it dies, at the same address."""

from collections.abc import Awaitable, Callable

import msgspec

from ..config.specs import EngineSpec
from ..loop.processes.part import Part
from ..loop.processes.port import claimed
from .parts import RunningParts

ENGINE = "rollway.inference.embedded.front:main"
HOST = "127.0.0.1"


async def start_engine(
    parts: RunningParts, part: EngineSpec, again: Callable[[], Awaitable[EngineSpec]]
) -> Part:
    """The first of them. The socket is ours: while one engine is gone, requests wait there for the
    next, which `again` describes."""
    sock = parts.hold(claimed("engine.embedded.port", HOST, part.engine.local.port))
    listen_fd = sock.fileno()

    def at_our_socket(one: EngineSpec) -> EngineSpec:
        return msgspec.structs.replace(one, listen_fd=listen_fd)

    async def renewed() -> EngineSpec:
        return at_our_socket(await again())

    return await parts.start_lasting("engine", ENGINE, at_our_socket(part), renewed, [listen_fd])
