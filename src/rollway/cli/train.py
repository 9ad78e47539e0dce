"""`rollway train`: trains a policy as one run file says."""

import asyncio
from pathlib import Path
from typing import Annotated

import msgspec
import tomli_w
from msgspec import Struct
from msgspec.structs import replace
from typer import Option, echo

from ..config.load import load
from ..config.plan import Plan, plan
from ..config.sections import RunConfig
from ..config.specs import WarmupSpec, watch_spec
from ..envs.registry import check_exists
from ..errors import ConfigError, RunDirError
from ..inference.vllm_server.command import check_startable
from ..launch.run import run_all
from ..launch.sinks import feed_sinks
from ..launch.watch import RunWatch
from ..loop.processes.child import log_to
from ..loop.watch.run import LoopWatch, run
from ..model.hub import find_folder
from ..model.shape import check_room, check_routes
from ..observe.console import Screen
from ..observe.prometheus import serve_metrics
from ..orchestrator.shell.advantage import check
from ..records.restored import StartPoint
from ..resume.resume import find_start_point
from ..rundir.rundir import RunDir, without_none
from ..warmup.build import build_model, warmup_spec
from ..warmup.recipe import is_built
from ..wire.keys import read_client_keys, read_server_keys
from .checks import Overrides, RunFile, need_sinks, need_torch
from .stopping import STOPPED, cancel_on_sigterm, exit_for


def train(
    run_file: RunFile,
    overrides: Overrides = None,
    dry_run: Annotated[
        bool,
        Option("--dry-run", help="Print all keys and the plan of the run; start nothing."),
    ] = False,
    resume: Annotated[
        bool,
        Option(
            "--resume", help="Continue the run where it stopped; no finished rollout is lost."
        ),
    ] = False,
    clean: Annotated[bool, Option("--clean", help="Delete the run directory first.")] = False,
) -> None:
    """Train a policy: start the engine, env servers, trainer and orchestrator, and show their progress.

    All files of the run are in its run directory. Ctrl-C ends the run cleanly; --resume continues it.
    """
    config = load(run_file, overrides or ())
    planned = plan(config)
    if dry_run:
        show(config, planned)
        return
    if resume and clean:
        raise RunDirError(
            "--resume continues a run and --clean deletes it: give only one of them"
        )
    computes = config.trainer is not None or config.engine.is_embedded
    if computes:
        need_torch("training")
    if config.engine.vllm:
        check_startable(config.engine.vllm)
    need_sinks(config.metrics)
    check_keys(config)
    check_envs(config)
    directory = RunDir(planned.run_dir)
    warmup = needed_warmup(config)
    if warmup and config.engine.routes and not warmup.warmup.experts:
        raise ConfigError(
            "engine.routes is true, but warmup.experts is 0: remove one of them"
        )
    if not warmup:
        config = with_model_folder(config, needs_weights=computes or bool(config.engine.vllm))
    if resume and not directory.exists:
        raise RunDirError(f"no run at {directory.path} to resume")
    if clean:
        directory.clean()
    with directory.lock():
        start = find_start_point(config, directory, resume=resume)
        if is_complete(config, start):
            echo(f"Nothing to do: {directory.path} has trained {config.max_steps} steps")
            return
        directory.create(config)
        run_and_show(TrainRequest(config, planned, directory, start, warmup))


def is_complete(config: RunConfig, start: StartPoint) -> bool:
    """Return whether all steps are trained and the last version is evaluated, if it has to be."""
    trained, evaluated = start.first_step - 1, start.restored.evaluated
    if config.eval and trained == config.max_steps:
        return evaluated is not None and evaluated >= trained
    return trained >= config.max_steps


class TrainRequest(Struct, frozen=True):
    config: RunConfig
    plan: Plan
    directory: RunDir
    start: StartPoint
    warmup: WarmupSpec | None


def run_and_show(training: TrainRequest) -> None:
    config, directory = training.config, training.directory
    log_to(directory.logs / "launcher.log", "launcher")
    screen = Screen()
    watch = RunWatch(screen, config.max_steps)
    spec = watch_spec(config.watch)
    try:
        run(
            "launcher", spec, lambda own_loop: run_training(training, screen, watch, own_loop)
        )
    except STOPPED as stopped:
        screen.close()
        echo(f"Stopped after step {watch.last_step}. --resume continues from there", err=True)
        raise exit_for(stopped) from None
    finally:
        screen.close()
    for line in watch.summary():
        echo(line)
    echo(f"Trained {config.max_steps} steps. Everything is in {directory.path}")


async def run_training(
    training: TrainRequest, screen: Screen, watch: RunWatch, own_loop: LoopWatch
) -> None:
    """Build the model if there is none yet, then run; SIGTERM ends the run like Ctrl-C does."""
    cancel_on_sigterm()
    config, directory = training.config, training.directory
    async with serve_metrics(config.metrics.prometheus, watch.exporter.render):
        await check(config.orchestrator)
        async with feed_sinks(config.metrics, directory, watch):
            if training.warmup:
                await build_model(training.warmup, directory, screen)
            watching = asyncio.create_task(watch.health.watch_own_loop(own_loop))
            try:
                await run_all(config, training.plan, directory, training.start, watch)
            finally:
                watching.cancel()


def check_envs(config: RunConfig) -> None:
    """Refuse an environment that does not exist, before a model is loaded."""
    for env in config.env:
        if not env.external:
            check_exists(env.id)


def check_keys(config: RunConfig) -> None:
    for env in config.env:
        if env.external and env.external.keys:
            read_client_keys(Path(env.external.keys))
    if zmq := config.transport.zmq:
        if zmq.keys:
            read_server_keys(Path(zmq.keys))
        if zmq.trainer_keys:
            read_client_keys(Path(zmq.trainer_keys))


def needed_warmup(config: RunConfig) -> WarmupSpec | None:
    """Return the warm-up of a run whose model must still be built."""
    warmup = warmup_spec(config)
    return warmup if warmup and not is_built(warmup) else None


def with_model_folder(config: RunConfig, *, needs_weights: bool) -> RunConfig:
    """Replace the name of a model on the hub by the folder that it was downloaded to."""
    model = config.model
    folder = find_folder(
        model.path,
        needs_weights=needs_weights,
        trusts_code=model.trust_remote_code,
    )
    check_routes(folder, config.engine.routes)
    check_room(folder, config.sampling.max_tokens)
    return replace(config, model=replace(model, path=folder))


def show(config: RunConfig, planned: Plan) -> None:
    tree = without_none(msgspec.to_builtins(config))
    echo(tomli_w.dumps({**tree, "plan": msgspec.to_builtins(planned)}).rstrip())
