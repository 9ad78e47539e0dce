"""Starts a whole run on this machine: engine, env servers, trainer, orchestrator."""

from contextlib import suppress
from functools import partial

import msgspec

from ..config.plan import Plan, core_spec, env_name
from ..config.sections import EnvConfig, RunConfig, TrainerConfig
from ..config.specs import (
    EngineSpec,
    EnvAddress,
    OrchestratorAddress,
    OrchestratorSpec,
    RouterSpec,
    Speaks,
    TrainerSpec,
    VllmSpec,
    watch_spec,
)
from ..config.terms import terms_of_run
from ..loop.lanes.threads import thread
from ..loop.processes.part import Part
from ..records.ids import Step
from ..records.restored import StartPoint
from ..records.turn import Sampling
from ..rundir.rundir import RunDir
from .engine import choose_speech, start_engine, start_vllm, wait_until_ready
from .parts import RunningParts
from .watch import RunWatch

ROUTER = "rollway.envserver.router.router:main"
TRAINER = "rollway.trainer.front:main"
ORCHESTRATOR = "rollway.orchestrator.shell.main:main"


async def run_all(
    config: RunConfig, plan: Plan, run: RunDir, start: StartPoint, watch: RunWatch
) -> None:
    """Start all parts of a run, wait for its last step, end all parts."""
    running = RunningParts(run.logs, watch.health.hear, watch.on_message, watch.say)
    async with running.run() as parts:
        watch.say(f"Starting: {', '.join(_what_starts(config, plan))}")
        engines, trainer = await start_engines(parts, config, run, start), None
        if config.trainer is not None:
            training = trainer_spec(config, config.trainer, run, start)
            trainer = await parts.start("trainer", TRAINER, training)
        urls = config.engine.urls or await wait_until_ready(engines, run.logs, watch.say)
        watch.say(f"Engine at {', '.join(urls)}; logs of all processes in {run.logs}")
        speaks = await choose_speech(config.engine, watch.say)
        routers, addresses = {}, {}
        for env in config.env:
            if env.external:
                addresses[env.id] = env.external.address
            else:
                serving = router_spec(config, run, start, env, urls, speaks)
                name = f"{env_name(env.id)}.router"
                routers[env.id] = await parts.start(name, ROUTER, serving)
        for env_id, router in routers.items():
            addresses[env_id] = await router.ready()
        if trainer is not None:
            await trainer.ready()
        engine_urls = urls if speaks == "tokens" else ()
        envs = await thread(env_addresses, config, addresses)
        spec = orchestrator_spec(config, plan, run, start, engine_urls, envs)
        orchestrator = await parts.start("orchestrator", ORCHESTRATOR, spec)
        watch.relay_to(orchestrator)
        await announce_batches(trainer, await orchestrator.ready(), run, watch)
        await parts.wait_for(orchestrator)


async def start_engines(
    parts: RunningParts, config: RunConfig, run: RunDir, start: StartPoint
) -> list[Part]:
    """Start the engines that the run file asks for: none if they run already."""
    if config.engine.vllm is not None:
        return await start_vllm(parts, config.engine.vllm, vllm_spec(config, run))
    if config.engine.is_embedded:
        next_spec = partial(thread, newest_engine_spec, config, run, start)
        return [await start_engine(parts, engine_spec(config, start), next_spec)]
    return []


async def announce_batches(
    trainer: Part | None, address: str, run: RunDir, watch: RunWatch
) -> None:
    """Tell the trainer where batches are shipped, or tell the user if the trainer is theirs."""
    if trainer is None:
        watch.say(f"Waiting for your trainer: open_batches('{address or run.path}')")
        return
    with suppress(ConnectionError):  # the trainer has died, and its listener raises the error
        await trainer.send(OrchestratorAddress(address))


def _what_starts(config: RunConfig, plan: Plan) -> list[str]:
    """List what this run starts; the rest runs already."""
    started = ["trainer"] if config.trainer else []
    if not config.engine.external:
        started.append("engine")
    if plan.num_workers:
        started.append(f"{plan.num_workers} env workers")
    return [*started, "orchestrator"]


def trainer_spec(
    config: RunConfig, trainer: TrainerConfig, run: RunDir, start: StartPoint
) -> TrainerSpec:
    return TrainerSpec(
        trainer=trainer,
        transport=config.transport,
        model=config.model,
        weights=start.weights,
        first_step=start.first_step,
        max_steps=config.max_steps,
        run_dir=str(run.path),
        seed=config.seed,
        watch=watch_spec(config.watch),
        probes_cache=not config.engine.is_embedded,
        max_kept_bytes=config.payload.budget_mb << 19,
    )


def engine_spec(config: RunConfig, start: StartPoint) -> EngineSpec:
    """The seed differs for each start: the same random numbers again would not average out."""
    version = start.first_step - 1
    return EngineSpec(
        model=config.model,
        engine=config.engine,
        weights=start.weights,
        version=version,
        seed=config.seed + 7919 * (start.generation + 1000 * version),
        watch=watch_spec(config.watch),
    )


def vllm_spec(config: RunConfig, run: RunDir) -> VllmSpec:
    return VllmSpec(
        model=config.model,
        engine=config.engine,
        replica=0,
        port=0,
        seed=config.seed,
        log=str(run.logs / "engine.log"),
        watch=watch_spec(config.watch),
    )


def newest_engine_spec(config: RunConfig, run: RunDir, start: StartPoint) -> EngineSpec:
    """Return the spec of an engine that starts again with the newest weights. Blocks."""
    published = run.last_published()
    if published >= start.first_step:
        weights, step = str(run.weights_of(published)), Step(published + 1)
        start = msgspec.structs.replace(start, weights=weights, first_step=step)
    return engine_spec(config, start)


def router_spec(
    config: RunConfig,
    run: RunDir,
    start: StartPoint,
    env: EnvConfig,
    urls: tuple[str, ...],
    speaks: Speaks = "tokens",
) -> RouterSpec:
    return RouterSpec(
        env=env,
        model=config.model,
        engine=config.engine,
        engine_urls=urls,
        payload=config.payload,
        payload_dir=str(run.payload),
        log_dir=str(run.logs),
        seed=config.seed,
        watch=watch_spec(config.watch),
        speaks=speaks,
        generation=start.generation,
    )


def orchestrator_spec(
    config: RunConfig,
    plan: Plan,
    run: RunDir,
    start: StartPoint,
    urls: tuple[str, ...],
    envs: tuple[EnvAddress, ...],
) -> OrchestratorSpec:
    sampling = config.sampling
    return OrchestratorSpec(
        core=core_spec(config, plan),
        sampling=Sampling(sampling.max_tokens, sampling.temperature),
        envs=envs,
        engine_urls=urls,
        engine=config.engine,
        weights=start.weights,
        model_path=config.model.path,
        must_push=not config.engine.is_embedded and start.first_step > 1,
        payload=config.payload,
        transport=config.transport,
        first_step=start.first_step,
        run_dir=str(run.path),
        watch=watch_spec(config.watch),
        restored=start.restored,
        generation=start.generation,
    )


def env_addresses(config: RunConfig, addresses: dict[str, str]) -> tuple[EnvAddress, ...]:
    """Return where each environment is served, and what the run expects there. Blocks to read files."""
    return tuple(_env_address(config, env, addresses[env.id]) for env in config.env)


def _env_address(config: RunConfig, env: EnvConfig, address: str) -> EnvAddress:
    server = env.external
    if server is None:
        return EnvAddress(env.id, address)
    terms, needs_frames = terms_of_run(config, env), not server.shares_payload
    return EnvAddress(env.id, address, server.keys, needs_frames, terms)
