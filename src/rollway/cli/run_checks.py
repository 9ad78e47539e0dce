"""The checks of a whole run, in this order: model, environments, ports, disk, keys, sinks.

None of them loads a model or writes a file. What they find is an error of a few seconds instead of one
after minutes.
"""

from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace
from typer import echo

from ..config.plan import Plan
from ..config.sections import RunConfig
from ..config.specs import WarmupSpec
from ..envs.in_lane import EnvSpec
from ..envs.registry import check_exists
from ..errors import ConfigError
from ..inference.vllm_server.command import check_startable
from ..loop.watch.run import run_unwatched
from ..model.folder import check_loadable, check_weights
from ..model.hub import find_folder
from ..model.shape import check_room, check_routes, read_shape
from ..orchestrator.shell.advantage import check as check_advantage
from ..preflight.checks import EnvToCheck, ModelToCheck, check_model_and_envs, check_wandb
from ..preflight.machine import (
    check_engine_key,
    check_engines,
    check_open_files,
    check_ports,
    check_room_on_disk,
    check_urls,
)
from ..records.task import Split
from ..warmup.build import warmup_spec
from ..warmup.recipe import is_built
from ..wire.keys import read_client_keys, read_server_keys
from .checks import need_sinks, need_torch


class CheckedRun(Struct, frozen=True):
    """A run in which no mistake was found. Its model is a folder of this machine."""

    config: RunConfig
    warmup: WarmupSpec | None
    """The model must still be built."""


def check_run(config: RunConfig, planned: Plan, *, is_dry: bool = False) -> CheckedRun:
    computes = config.trainer is not None or config.engine.is_embedded
    if computes:
        need_torch("training")
    if config.engine.vllm:
        check_startable(config.engine.vllm)
    check_urls(config.engine.urls, "'engine.external.url'")
    warmup = needed_warmup(config)
    # a dry run downloads nothing but a model's small files
    is_here = not is_dry or Path(config.model.path).is_dir()
    needs_weights = is_here and (computes or bool(config.engine.vllm))
    if not warmup:
        config = with_model_folder(config, needs_weights=needs_weights)
    for env in config.env:
        if not env.external:
            check_exists(env.id)
    run_unwatched(_check_code(config, is_built=warmup is None, is_loaded=computes))
    for index, env in enumerate(config.env):
        if not env.external:
            check_open_files(f"env.{index}.server.concurrency", env.local.concurrency)
    check_ports(config)
    weights_bytes = 0
    if needs_weights and not warmup:
        weights_bytes = check_weights(config.model.path)
        check_loadable(config.model.path)
    trains = config.trainer is not None
    check_room_on_disk(Path(planned.run_dir), weights_bytes, trains=trains)
    check_keys(config)
    check_engine_key(config.engine)
    if not is_dry:
        check_engines(config.engine.urls)
    need_sinks(config.metrics)
    if project := config.metrics.wandb_project:
        run_unwatched(check_wandb(project))
    return CheckedRun(config, warmup)


async def _check_code(config: RunConfig, *, is_built: bool, is_loaded: bool) -> None:
    """Examine the model and all code of the user: environments, and an advantage function."""
    model = ModelToCheck(config.model, _max_context(config, is_built), is_built, is_loaded)
    envs = [
        EnvToCheck(
            EnvSpec(env.id, msgspec.json.encode(env.args), config.seed),
            _splits(config, env.id),
        )
        for env in config.env
        if not env.external
    ]
    await check_model_and_envs(model, envs, lambda text: echo(text, err=True))
    await check_advantage(config.orchestrator)


def _splits(config: RunConfig, env_id: str) -> tuple[Split, ...]:
    """Return the splits that the run asks for; the last one may have no tasks."""
    evaluated = config.eval and (config.eval.envs is None or env_id in config.eval.envs)
    return ("train", "eval") if evaluated else ("train",)


def _max_context(config: RunConfig, is_built: bool) -> int | None:
    """Return the tokens that a conversation may have, as far as they are known without the engine."""
    engine = config.engine
    wanted = engine.embedded_context if engine.is_embedded else engine.max_context
    shape = read_shape(config.model.path) if is_built else None
    known = [limit for limit in (wanted, shape.max_context if shape else 0) if limit]
    return min(known, default=None)


def needed_warmup(config: RunConfig) -> WarmupSpec | None:
    """Return the warm-up of a run whose model must still be built."""
    spec = warmup_spec(config)
    if spec is None or is_built(spec):
        return None
    if config.engine.routes and not spec.warmup.experts:
        raise ConfigError(
            "engine.routes is true, but warmup.experts is 0: remove one of them"
        )
    return spec


def with_model_folder(config: RunConfig, *, needs_weights: bool) -> RunConfig:
    """Replace the name of a model on the hub by the folder that it was downloaded to."""
    model = config.model
    folder = find_folder(
        model.path, needs_weights=needs_weights, trusts_code=model.trust_remote_code
    )
    check_routes(folder, config.engine.routes)
    check_room(folder, config.sampling.max_tokens)
    return replace(config, model=replace(model, path=folder))


def check_keys(config: RunConfig) -> None:
    for env in config.env:
        if env.external and env.external.keys:
            read_client_keys(Path(env.external.keys))
    if zmq := config.transport.zmq:
        if zmq.keys:
            read_server_keys(Path(zmq.keys))
        if zmq.trainer_keys:
            read_client_keys(Path(zmq.trainer_keys))
