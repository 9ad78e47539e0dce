"""`rollway train`: trains a policy as one run file says."""

import asyncio
import shlex
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import tomli_w
from msgspec import Struct
from typer import Exit, Option, echo

from ..config.credentials import hide_credentials
from ..config.load import load
from ..config.plan import Plan, plan
from ..config.sections import RunConfig
from ..config.specs import WarmupSpec, watch_spec
from ..errors import ConfigError, RunDirError
from ..launch.run import run_all
from ..launch.sinks import feed_sinks
from ..launch.watch import RunWatch
from ..loop.processes.child import log_to
from ..loop.processes.leftovers import mark_folder
from ..loop.watch.run import LoopWatch, run
from ..observe.console import Screen
from ..observe.prometheus import serve_metrics
from ..preflight.machine import check_engines
from ..records.restored import StartPoint
from ..resume.resume import find_start_point, refuse_to_overwrite
from ..rundir.rundir import RunDir, shown_tree
from ..warmup.build import build_model
from .checks import Overrides, RunFile
from .run_checks import check_run
from .stopping import STOPPED, cancel_on_sigterm, exit_for, explain

FAILED = 1


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
    directory = RunDir(planned.run_dir)
    check_directory(directory, resume=resume, clean=clean)
    if not (resume or clean or dry_run):
        refuse_to_overwrite(directory)
    command = train_command(run_file, overrides or ())
    try:
        checked = check_run(config, planned, is_dry=dry_run)
    except KeyboardInterrupt as stopped:
        echo(f"Stopped before anything was started. To start over: {command}", err=True)
        raise exit_for(stopped) from None
    if dry_run:
        show(checked.config, planned)
        say_dry_run(checked.config, directory, may_exist=resume or clean)
        return
    if clean:
        directory.clean()
    with directory.lock():
        mark_folder(directory.path)
        start = find_start_point(checked.config, directory, resume=resume, say=echo)
        if is_complete(config, start):
            echo(
                f"Nothing to do: {directory.path} has trained {config.max_steps} steps. To train more, "
                "raise 'max_steps'"
            )
            return
        directory.create(checked.config)
        request = TrainRequest(
            checked.config, planned, directory, start, checked.warmup, command
        )
        run_and_show(request)


def check_directory(directory: RunDir, *, resume: bool, clean: bool) -> None:
    if resume and clean:
        raise RunDirError(
            "--resume continues a run and --clean deletes it: give only one of them"
        )
    if resume and not directory.exists:
        raise RunDirError(f"no run at {directory.path} to resume")


def say_dry_run(config: RunConfig, directory: RunDir, *, may_exist: bool) -> None:
    """Say what would keep the run from starting now, and may be different when it is started."""
    if directory.has_begun and not may_exist:
        echo(
            f"Before you start: {directory.path} holds a run: add --resume or --clean",
            err=True,
        )
    try:
        check_engines(config.engine.urls)
    except ConfigError as error:
        echo(f"Before you start: {error}", err=True)
    echo("No mistake was found. This was a dry run: nothing was started", err=True)


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
    command: str
    """What the user typed, without --resume and --clean."""


def train_command(run_file: Path, overrides: Sequence[str]) -> str:
    shown = map(hide_credentials, overrides)
    settings = [word for override in shown for word in ("--set", override)]
    return shlex.join(["rollway", "train", str(run_file), *settings])


def run_and_show(training: TrainRequest) -> None:
    config, directory = training.config, training.directory
    place = directory.identify()
    log_to(directory.logs / "launcher.log", "launcher")
    screen = Screen()
    watch = RunWatch(screen, config.max_steps, training.start.first_step - 1)
    spec = watch_spec(config.watch)
    try:
        run(
            "launcher", spec, lambda own_loop: run_training(training, screen, watch, own_loop)
        )
    except STOPPED as stopped:
        screen.close()
        echo(f"Stopped. {what_next(training, watch.last_step)}", err=True)
        raise exit_for(stopped) from None
    except Exception as error:
        screen.close()
        # whichever part misses its files first says so in its own words: this is the cause
        removed = directory.identify() not in (place, None)
        show_error(directory.removed() if removed else error)
        echo(what_next(training, watch.last_step), err=True)
        raise Exit(FAILED) from None
    screen.close()
    for line in watch.summary():
        echo(line)
    echo(f"Trained {config.max_steps} steps. Everything is in {directory.path}")


def what_next(training: TrainRequest, last_step: int) -> str:
    """Say how far an interrupted run has come, and what to type to go on."""
    if not training.directory.exists:
        return f"Nothing is left to continue. To start over: {training.command}"
    if not training.directory.has_begun:
        return f"No rollout was run yet. To start over: {training.command}"
    trained = f"{last_step} of {training.config.max_steps} steps are trained"
    return f"{trained}. To continue: {training.command} --resume"


def show_error(error: Exception) -> None:
    """Print an error that the user can fix as one line, and a bug with its traceback."""
    if (text := explain(error)) is not None:
        echo(f"rollway: {text}", err=True)
    else:
        traceback.print_exception(error)


async def run_training(
    training: TrainRequest, screen: Screen, watch: RunWatch, own_loop: LoopWatch
) -> None:
    """Build the model if there is none yet, then run; SIGTERM ends the run like Ctrl-C does."""
    cancel_on_sigterm()
    config, directory = training.config, training.directory
    async with (
        serve_metrics(config.metrics.prometheus, watch.exporter.render),
        feed_sinks(config.metrics, directory, watch),
    ):
        if training.warmup:
            await build_model(training.warmup, directory, screen)
        watching = asyncio.create_task(watch.health.watch_own_loop(own_loop))
        try:
            await run_all(config, training.plan, directory, training.start, watch)
        finally:
            watching.cancel()


def show(config: RunConfig, planned: Plan) -> None:
    tree = {**shown_tree(config), "plan": msgspec.to_builtins(planned)}
    echo(tomli_w.dumps(tree).rstrip())
