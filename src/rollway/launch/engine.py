"""The embedded engine of a run, restarted at the same address when it dies."""

from collections.abc import Awaitable, Callable

import msgspec

from ..config.specs import EngineSpec
from ..loop.processes.part import Part
from ..loop.processes.port import bind_port
from .parts import RunningParts

ENGINE = "rollway.inference.embedded.front:main"
HOST = "127.0.0.1"


async def start_engine(
    parts: RunningParts, spec: EngineSpec, next_spec: Callable[[], Awaitable[EngineSpec]]
) -> Part:
    """Start the engine; `next_spec` returns the spec of the one that follows when it dies.

    The launcher owns the listening socket. Requests that arrive while no engine runs wait there.
    """
    port = bind_port("engine.embedded.port", HOST, spec.engine.local.port)
    listen_fd = parts.keep_open(port).fileno()
    first = msgspec.structs.replace(spec, listen_fd=listen_fd)

    async def next_config() -> EngineSpec:
        return msgspec.structs.replace(await next_spec(), listen_fd=listen_fd)

    return await parts.start("engine", ENGINE, first, next_config, [listen_fd])
