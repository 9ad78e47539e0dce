"""A whole evaluation on this machine: an engine if there is none yet, an env server, and its client."""

import asyncio

from msgspec.structs import replace

from ..config.plan import env_name
from ..config.sections import (
    EmbeddedEngineConfig,
    EngineConfig,
    EnvConfig,
    ExternalEngineConfig,
    ModelConfig,
    PayloadConfig,
    ServerConfig,
)
from ..config.specs import EngineSpec, RouterSpec, ServerLimits
from ..envserver import client as envs
from ..launch import engine
from ..launch.parts import RunningParts
from ..launch.run import ROUTER
from ..loop.watch.run import LoopWatch
from .driver import EvalDriver, Evaluation
from .recorder import open_recorder

MAX_EMBEDDED_BATCH = 128
SEGMENT_MB = 16


async def evaluate(evaluation: Evaluation, watch: LoopWatch) -> None:
    """Start the processes that are needed, run all missing rollouts, and end the processes again."""
    spec, folder = evaluation.spec, evaluation.folder
    progress, show = evaluation.progress, evaluation.screen.line
    health = progress.health
    background = [asyncio.create_task(health.watch_own_loop(watch))]
    server = router_spec(evaluation)
    try:
        running = RunningParts(folder.logs, health.hear, lambda body: None, show)
        async with running.run() as parts:
            if not spec.engine_url:
                show(f"Starting the embedded engine with {spec.model}")
                server = replace(server, engine_urls=(await start_engine(parts, server),))
            router = await parts.start(f"{env_name(spec.env)}.router", ROUTER, server)
            address = await router.ready()
            async with envs.connect(address) as client, open_recorder(folder) as recorder:
                background.append(asyncio.create_task(progress.show()))
                await EvalDriver(client, evaluation, recorder).drive()
    finally:
        for task in background:
            task.cancel()


async def start_engine(parts: RunningParts, server: RouterSpec) -> str:
    model = server.model
    spec = EngineSpec(model, server.engine, model.path, 0, server.seed, server.watch)

    async def restart_spec() -> EngineSpec:
        return spec

    started = await engine.start_engine(parts, spec, restart_spec)
    return await started.ready()


def router_spec(evaluation: Evaluation) -> RouterSpec:
    """Return the env server's specification, without the address of an embedded engine."""
    spec, runtime, folder = evaluation.spec, evaluation.runtime, evaluation.folder
    url, concurrency = spec.engine_url, runtime.concurrency
    server = ServerConfig(
        workers=min(runtime.workers, concurrency),
        concurrency=max(concurrency, spec.num_rollouts),
        rollout_deadline_s=runtime.rollout_deadline_s,
    )
    embedded = EmbeddedEngineConfig(max_batch=min(concurrency, MAX_EMBEDDED_BATCH))
    external = ExternalEngineConfig(url=url, model=spec.model, key_var=runtime.key_var)
    engine = EngineConfig(
        embedded=None if url else embedded,
        external=external if url else None,
        max_context=None if url else runtime.max_context,
        request_deadline_s=runtime.rollout_deadline_s,
        routes=False,
    )
    return RouterSpec(
        env=EnvConfig(id=spec.env, args=spec.args, server=server),
        model=ModelConfig(
            path=spec.tokenizer,
            renderer=spec.renderer,
            template=spec.template,
            trust_remote_code=runtime.trust_remote_code,
        ),
        engine=engine,
        engine_urls=(url,),
        speaks=spec.speaks,
        is_training=False,
        limits=ServerLimits(segment_mb=SEGMENT_MB),
        payload=PayloadConfig(),
        payload_dir=str(folder.payload),
        log_dir=str(folder.logs),
        seed=spec.seed,
        watch=runtime.watch,
    )
