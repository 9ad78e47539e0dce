"""A whole evaluation on this machine: an engine if none runs yet, an env server, and its client."""

import asyncio

import msgspec
from msgspec import Struct

from ..config.parts import EnginePart, RouterPart
from ..config.plan import env_name
from ..config.sections import EngineConfig, EnvConfig, ModelConfig, PayloadConfig, WatchConfig
from ..envs.source import EnvSpec, load_shared
from ..envserver import client as envs
from ..errors import EnvironmentNotFound, LaneError
from ..launch import engine
from ..launch.parts import Parts, started_parts
from ..launch.run import ROUTER
from ..loop.lanes import ProcessLane
from ..loop.run import Watch
from ..observe.console import Screen
from ..records.payload import PayloadRef
from .asked import Asked
from .driver import Driver, Hears
from .folder import EvalFolder
from .progress import EvalProgress
from .recorder import open_recorder
from .result import Key, Result

MAX_EMBEDDED_BATCH = 128
SEGMENT_MB = 16
LOAD_DEADLINE_S = 120.0


class HowToRun(Struct, frozen=True, kw_only=True):
    """What decides how fast an evaluation runs, not what its results mean."""

    concurrency: int
    workers: int
    deadline_s: float
    max_context: int
    key_var: str
    watch: WatchConfig = WatchConfig()


async def evaluate(
    asked: Asked, how: HowToRun, folder: EvalFolder, known: dict[Key, Result],
    progress: EvalProgress, screen: Screen, watch: Watch,
) -> None:  # fmt: skip
    """Start what is needed, run what is missing, end everything."""
    background = [asyncio.create_task(progress.watch_itself(watch))]
    try:
        if not asked.base_url:
            await check_env(asked)
        async with started_parts(
            folder.logs, progress.on_stats, lambda body: None, screen.line
        ) as parts:
            url = asked.base_url or await start_engine(parts, asked, how, screen)
            part = router_part(asked, how, folder, url)
            router = await parts.start(f"{env_name(asked.env)}.router", ROUTER, part)
            async with (
                envs.connect(await router.ready()) as client,
                open_recorder(folder) as recorder,
            ):
                background.append(asyncio.create_task(progress.show()))

                async def on_result(result: Result, ref: PayloadRef | None) -> None:
                    await recorder.add(result, ref)
                    progress.on_result(result)

                hears = Hears(progress.begin, on_result, progress.on_stats, screen.line)
                await Driver(client, asked, known, how.concurrency, hears).drive()
    finally:
        for task in background:
            task.cancel()


async def check_env(asked: Asked) -> None:
    """Refuse an environment that leads nowhere before an engine is started. Its code runs elsewhere."""
    spec = EnvSpec(asked.env, msgspec.json.encode(asked.args), asked.seed)
    async with ProcessLane("env-check", 1) as lane:
        try:
            await lane.call(load_shared, spec, deadline_s=LOAD_DEADLINE_S)
        except LaneError as error:
            raise EnvironmentNotFound(str(error).removeprefix("EnvironmentNotFound: ")) from None


async def start_engine(parts: Parts, asked: Asked, how: HowToRun, screen: Screen) -> str:
    screen.line(f"Starting the embedded engine with {asked.model}")
    part = EnginePart(
        model=model_config(asked),
        engine=engine_config(asked, how),
        weights=asked.model,
        version=0,
        seed=asked.seed,
        watch=how.watch,
    )

    async def again() -> EnginePart:
        return part

    started = await engine.start_engine(parts, part, again)
    return await started.ready()


def model_config(asked: Asked) -> ModelConfig:
    return ModelConfig(path=asked.tokenizer, renderer=asked.renderer, template=asked.template)


def engine_config(asked: Asked, how: HowToRun) -> EngineConfig:
    return EngineConfig(
        url=asked.base_url,
        speaks=asked.speaks,
        model=asked.model if asked.base_url else "",
        key_var=how.key_var if asked.base_url else "",
        max_batch=min(how.concurrency, MAX_EMBEDDED_BATCH),
        max_context=how.max_context,
        request_deadline_s=how.deadline_s,
        routes=False,
    )


def router_part(asked: Asked, how: HowToRun, folder: EvalFolder, url: str) -> RouterPart:
    return RouterPart(
        env=EnvConfig(
            id=asked.env,
            args=asked.args,
            workers=min(how.workers, how.concurrency),
            concurrency=max(how.concurrency, asked.num_rollouts),
            rollout_deadline_s=how.deadline_s,
        ),
        model=model_config(asked),
        engine=engine_config(asked, how),
        engine_urls=(url,),
        payload=PayloadConfig(segment_mb=SEGMENT_MB),
        payload_dir=str(folder.payload),
        log_dir=str(folder.logs),
        seed=asked.seed,
        watch=how.watch,
    )
