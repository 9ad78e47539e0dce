"""The engines that a run starts. Each is restarted at the same address when it dies."""

import asyncio
import os
import secrets
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from time import monotonic

import msgspec

from ..config.sections import ENGINE_KEY_VAR, EngineConfig, VllmConfig
from ..config.specs import EngineSpec, Speaks, VllmSpec
from ..errors import ConfigError
from ..inference.engines.link import EngineAccess
from ..loop.processes.part import Part
from ..loop.processes.port import bind_port
from .parts import RunningParts

ENGINE = "rollway.inference.embedded.front:main"
VLLM = "rollway.inference.vllm_server.server:main"
HOST = "127.0.0.1"
SAY_EVERY_S = 30.0


async def start_engine(
    parts: RunningParts, spec: EngineSpec, next_spec: Callable[[], Awaitable[EngineSpec]]
) -> Part:
    """Start the engine; `next_spec` returns the spec of the one that follows when it dies. Only
    processes of this run have its key.

    The launcher owns the listening socket. Requests that arrive while no engine runs wait there.
    """
    make_engine_key()
    port = bind_port("engine.embedded.port", HOST, spec.engine.local.port)
    listen_fd = parts.keep_open(port).fileno()
    first = msgspec.structs.replace(spec, listen_fd=listen_fd)

    async def next_config() -> EngineSpec:
        return msgspec.structs.replace(await next_spec(), listen_fd=listen_fd)

    return await parts.start("engine", ENGINE, first, next_config, [listen_fd])


def make_engine_key() -> str:
    """Make up the key that engines demand, unless the user has chosen one. Processes that start from now
    on inherit it. No command line shows it, and only this user can read the environment of a process."""
    if not os.environ.get(ENGINE_KEY_VAR):
        os.environ[ENGINE_KEY_VAR] = secrets.token_hex(16)
    return os.environ[ENGINE_KEY_VAR]


async def start_vllm(parts: RunningParts, config: VllmConfig, spec: VllmSpec) -> list[Part]:
    """Start all replicas. Only processes of this run have their key. The launcher binds their ports and
    does not listen there, so that a replica that starts again gets the same one."""
    make_engine_key()
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


async def wait_until_ready(
    engines: Sequence[Part], logs: Path, say: Callable[[str], None]
) -> tuple[str, ...]:
    """Return the addresses of engines once all answer. Large models take long to load, so this says now
    and then that they still do."""
    waiting = asyncio.gather(*(engine.ready() for engine in engines))
    start_s = monotonic()
    try:
        while not (await asyncio.wait([waiting], timeout=SAY_EVERY_S))[0]:
            waited_s = monotonic() - start_s
            say(
                f"The engine is still starting after {waited_s:.0f} s; its output is in {logs}"
            )
        return tuple(waiting.result())
    finally:
        waiting.cancel()


async def choose_speech(engine: EngineConfig, say: Callable[[str], None]) -> Speaks:
    """Return how workers talk with the engines. Only a run file that says so trains on messages."""
    external = engine.external
    if external is None or not external.fill_ids:
        return "tokens"
    key, model = os.environ.get(external.key_var or "", ""), external.model or ""
    accesses = [
        EngineAccess(url, engine.request_deadline_s, model, key) for url in external.urls
    ]
    # only here, because the client takes long to import
    from ..inference.engines.speech import find_speech

    speaks = await find_speech(accesses)
    if speaks == "messages":
        if engine.routes:
            raise ConfigError(
                "'engine.routes' is true, but the engine takes only messages, and returns no routes for "
                "them: remove the key"
            )
        say(
            "The engine takes messages, but no token ids and no weights. Rollway makes the ids that its "
            "replies lack from their text, and the engine keeps the weights it has"
        )
    return speaks
