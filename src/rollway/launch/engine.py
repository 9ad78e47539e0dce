"""The engines that a run starts. Each is restarted at the same address when it dies."""

import os
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from ..config.sections import ENGINE_KEY_VAR, VllmConfig
from ..config.specs import EngineSpec, VllmSpec
from ..loop.processes.part import Part
from ..loop.processes.port import bind_port
from .parts import RunningParts

ENGINE = "rollway.inference.embedded.front:main"
VLLM = "rollway.inference.vllm_server.server:main"
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


async def start_vllm(parts: RunningParts, config: VllmConfig, spec: VllmSpec) -> list[Part]:
    """Start all replicas. Only processes of this run have their key. The launcher binds their ports and
    does not listen there, so that a replica that starts again gets the same one."""
    os.environ.setdefault(ENGINE_KEY_VAR, secrets.token_hex(16))
    started = []
    for replica in range(config.replicas):
        name = "engine" if config.replicas == 1 else f"engine.{replica}"
        port = config.port and config.port + replica
        reserved = parts.keep_open(bind_port("engine.vllm.port", HOST, port))
        own = msgspec.structs.replace(
            spec,
            replica=replica,
            port=reserved.getsockname()[1],
            log=spec.log and str(Path(spec.log).with_name(f"{name}.log")),
        )

        async def unchanged(spec: VllmSpec = own) -> VllmSpec:
            return spec

        started.append(await parts.start(name, VLLM, own, unchanged))
    return started
