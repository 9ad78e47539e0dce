"""A whole evaluation on this machine: an engine if none runs yet, an env server, and its client."""

import asyncio

import msgspec
from msgspec import Struct

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
from ..config.specs import EngineSpec, RouterSpec, ServerLimits, WatchSpec
from ..envs.in_lane import EnvSpec, load_shared
from ..envserver import client as envs
from ..errors import EnvironmentNotFound, LaneError, LaneRaised
from ..launch import engine
from ..launch.parts import RunningParts, open_parts
from ..launch.run import ROUTER
from ..loop.lanes.lanes import ProcessLane
from ..loop.watch.run import LoopWatch
from ..observe.console import Screen
from ..records.payload import PayloadRef
from .driver import EvalDriver, EvalListener
from .folder import EvalFolder
from .progress import EvalProgress
from .recorder import open_recorder
from .result import EvalResult, ResultKey
from .spec import EvalSpec

MAX_EMBEDDED_BATCH = 128
SEGMENT_MB = 16
LOAD_DEADLINE_S = 120.0


class EvalRuntime(Struct, frozen=True, kw_only=True):
    """What decides how fast an evaluation runs, not what its results mean."""

    concurrency: int
    workers: int
    deadline_s: float
    max_context: int
    key_var: str
    watch: WatchSpec = WatchSpec()


async def evaluate(
    asked: EvalSpec, how: EvalRuntime, folder: EvalFolder, known: dict[ResultKey, EvalResult],
    progress: EvalProgress, screen: Screen, watch: LoopWatch,
) -> None:  # fmt: skip
    """Start what is needed, run what is missing, end everything."""
    background = [asyncio.create_task(progress.health.watch_own_loop(watch))]
    try:
        if not asked.base_url:
            await check_env(asked)
        async with open_parts(
            folder.logs, progress.health.hear, lambda body: None, screen.line
        ) as parts:
            url = asked.base_url or await start_engine(parts, asked, how, screen)
            part = router_spec(asked, how, folder, url)
            router = await parts.start(f"{env_name(asked.env)}.router", ROUTER, part)
            async with (
                envs.connect(await router.ready()) as client,
                open_recorder(folder) as recorder,
            ):
                background.append(asyncio.create_task(progress.show()))

                async def on_result(result: EvalResult, ref: PayloadRef | None) -> None:
                    await recorder.add(result, ref)
                    progress.on_result(result)

                hears = EvalListener(progress.begin, on_result, progress.health.hear, screen.line)
                await EvalDriver(client, asked, known, how.concurrency, hears).drive()
    finally:
        for task in background:
            task.cancel()


async def check_env(asked: EvalSpec) -> None:
    """Refuse an environment that leads nowhere before an engine is started. Its code runs elsewhere."""
    spec = EnvSpec(asked.env, msgspec.json.encode(asked.args), asked.seed)
    async with ProcessLane("env-check", 1) as lane:
        try:
            await lane.call(load_shared, spec, deadline_s=LOAD_DEADLINE_S)
        except LaneRaised as error:
            is_not_found = error.kind == EnvironmentNotFound.__name__
            raise EnvironmentNotFound(error.text if is_not_found else str(error)) from None
        except LaneError as error:
            raise EnvironmentNotFound(str(error)) from None


async def start_engine(parts: RunningParts, asked: EvalSpec, how: EvalRuntime, screen: Screen) -> str:
    screen.line(f"Starting the embedded engine with {asked.model}")
    part = EngineSpec(
        model=model_config(asked),
        engine=engine_config(asked, how),
        weights=asked.model,
        version=0,
        seed=asked.seed,
        watch=how.watch,
    )

    async def again() -> EngineSpec:
        return part

    started = await engine.start_engine(parts, part, again)
    return await started.ready()


def model_config(asked: EvalSpec) -> ModelConfig:
    return ModelConfig(path=asked.tokenizer, renderer=asked.renderer, template=asked.template)


def engine_config(asked: EvalSpec, how: EvalRuntime) -> EngineConfig:
    max_batch = min(how.concurrency, MAX_EMBEDDED_BATCH)
    external = ExternalEngineConfig(url=asked.base_url, model=asked.model, key_var=how.key_var)
    return EngineConfig(
        embedded=None if asked.base_url else EmbeddedEngineConfig(max_batch=max_batch),
        external=external if asked.base_url else None,
        max_context=how.max_context,
        request_deadline_s=how.deadline_s,
        routes=False,
    )


def router_spec(asked: EvalSpec, how: EvalRuntime, folder: EvalFolder, url: str) -> RouterSpec:
    return RouterSpec(
        env=EnvConfig(
            id=asked.env,
            args=asked.args,
            server=ServerConfig(
                workers=min(how.workers, how.concurrency),
                concurrency=max(how.concurrency, asked.num_rollouts),
                rollout_deadline_s=how.deadline_s,
            ),
        ),
        model=model_config(asked),
        engine=engine_config(asked, how),
        engine_urls=(url,),
        speaks=asked.speaks,
        limits=ServerLimits(segment_mb=SEGMENT_MB),
        payload=PayloadConfig(),
        payload_dir=str(folder.payload),
        log_dir=str(folder.logs),
        seed=asked.seed,
        watch=how.watch,
    )
