"""A whole evaluation on this machine: an engine if there is none yet, an env server, and its client."""

import asyncio

import msgspec

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
from ..envs.in_lane import EnvSpec, load_shared
from ..envserver import client as envs
from ..errors import EnvironmentInvalid, EnvironmentNotFound, LaneError, LaneRaised
from ..launch import engine
from ..launch.parts import RunningParts, open_parts
from ..launch.run import ROUTER
from ..loop.lanes.lanes import ProcessLane
from ..loop.watch.run import LoopWatch
from ..observe.console import Screen
from .driver import EvalDriver, Evaluation
from .folder import EvalFolder
from .recorder import open_recorder
from .spec import EvalRuntime, EvalSpec

MAX_EMBEDDED_BATCH = 128
SEGMENT_MB = 16
LOAD_DEADLINE_S = 120.0


async def evaluate(evaluation: Evaluation, watch: LoopWatch) -> None:
    """Start the processes that are needed, run all missing rollouts, and end the processes again."""
    spec, runtime, folder = evaluation.spec, evaluation.runtime, evaluation.folder
    progress, screen = evaluation.progress, evaluation.screen
    background = [asyncio.create_task(progress.health.watch_own_loop(watch))]
    try:
        if not spec.engine_url:
            await check_env(spec)
        async with open_parts(
            folder.logs, progress.health.hear, lambda body: None, screen.line
        ) as parts:
            url = spec.engine_url or await start_engine(parts, spec, runtime, screen)
            name = f"{env_name(spec.env)}.router"
            router = await parts.start(name, ROUTER, router_spec(spec, runtime, folder, url))
            async with (
                envs.connect(await router.ready()) as client,
                open_recorder(folder) as recorder,
            ):
                background.append(asyncio.create_task(progress.show()))
                await EvalDriver(client, evaluation, recorder).drive()
    finally:
        for task in background:
            task.cancel()


async def check_env(spec: EvalSpec) -> None:
    """Refuse an environment that cannot be loaded before an engine starts. Its code runs in a lane."""
    env = EnvSpec(spec.env, msgspec.json.encode(spec.args), spec.seed)
    async with ProcessLane("env-check", 1) as lane:
        try:
            await lane.call(load_shared, env, deadline_s=LOAD_DEADLINE_S)
        except LaneError as error:
            if isinstance(error, LaneRaised):
                for kind in (EnvironmentNotFound, EnvironmentInvalid):
                    if error.kind == kind.__name__:
                        raise kind(error.text) from None
            raise EnvironmentInvalid(str(error)) from None


async def start_engine(parts: RunningParts, spec: EvalSpec, runtime: EvalRuntime, screen: Screen) -> str:
    """Start the embedded engine and return its address."""
    screen.line(f"Starting the embedded engine with {spec.model}")
    engine_spec = EngineSpec(
        model=model_config(spec),
        engine=engine_config(spec, runtime),
        weights=spec.model,
        version=0,
        seed=spec.seed,
        watch=runtime.watch,
    )

    async def restart_spec() -> EngineSpec:
        return engine_spec

    started = await engine.start_engine(parts, engine_spec, restart_spec)
    return await started.ready()


def model_config(spec: EvalSpec) -> ModelConfig:
    return ModelConfig(path=spec.tokenizer, renderer=spec.renderer, template=spec.template)


def engine_config(spec: EvalSpec, runtime: EvalRuntime) -> EngineConfig:
    url = spec.engine_url
    embedded = EmbeddedEngineConfig(max_batch=min(runtime.concurrency, MAX_EMBEDDED_BATCH))
    external = ExternalEngineConfig(url=url, model=spec.model, key_var=runtime.key_var)
    return EngineConfig(
        embedded=None if url else embedded,
        external=external if url else None,
        max_context=runtime.max_context,
        request_deadline_s=runtime.rollout_deadline_s,
        routes=False,
    )


def router_spec(spec: EvalSpec, runtime: EvalRuntime, folder: EvalFolder, url: str) -> RouterSpec:
    concurrency = runtime.concurrency
    server = ServerConfig(
        workers=min(runtime.workers, concurrency),
        concurrency=max(concurrency, spec.num_rollouts),
        rollout_deadline_s=runtime.rollout_deadline_s,
    )
    return RouterSpec(
        env=EnvConfig(id=spec.env, args=spec.args, server=server),
        model=model_config(spec),
        engine=engine_config(spec, runtime),
        engine_urls=(url,),
        speaks=spec.speaks,
        limits=ServerLimits(segment_mb=SEGMENT_MB),
        payload=PayloadConfig(),
        payload_dir=str(folder.payload),
        log_dir=str(folder.logs),
        seed=spec.seed,
        watch=runtime.watch,
    )
