"""What follows from a run file: sizes, bounds and paths. `--dry-run` shows them."""

import re
from pathlib import Path

from msgspec import Struct

from ..errors import ConfigError
from .address import check_bind, check_connect
from .sections import EnvConfig, RunConfig
from .specs import CoreSpec


class Plan(Struct, frozen=True):
    """Values derived from a run file. The same file gives the same plan on any machine."""

    run_dir: str
    groups_per_batch: int
    max_outstanding: int
    """Rollouts that may be dispatched and not yet trained or dropped."""
    max_in_flight: int
    num_workers: int
    worker_slots: int
    """Rollouts that all workers together run at the same time."""
    slots_key: str
    """The keys that decide how many rollouts workers and engine run at the same time."""
    engine: str
    binds: str
    """The bound that limits how many rollouts run at the same time."""


def env_name(env_id: str) -> str:
    """Return the name of an environment as files and processes carry it."""
    stem = Path(env_id).stem if env_id.endswith(".py") else env_id
    return re.sub(r"[^A-Za-z0-9_-]+", "-", stem).strip("-") or "env"


def plan(config: RunConfig) -> Plan:
    """Derive the plan, and refuse settings that could never train."""
    _check_sizes(config)
    _check_envs(config)
    _check_transport(config)
    _check_difficulty(config)
    settings, engine = config.orchestrator, config.engine
    servers = [env.local for env in config.env if not env.external]
    outstanding = settings.batch_size * (1 + settings.max_off_policy_steps)
    slots = sum(server.workers * server.concurrency for server in servers)
    slots_bounds = {}
    if len(servers) == len(config.env):
        slots_bounds["env.server.workers × env.server.concurrency"] = slots
    if engine.is_embedded:
        slots_bounds["engine.embedded.max_batch"] = engine.local.max_batch
    bounds = {
        "orchestrator.max_in_flight": settings.max_in_flight,
        "orchestrator.batch_size × (1 + max_off_policy_steps)": outstanding,
        **slots_bounds,
    }
    return Plan(
        run_dir=str(Path(config.output_dir) / config.name),
        groups_per_batch=settings.batch_size // settings.group_size,
        max_outstanding=outstanding,
        max_in_flight=settings.max_in_flight,
        num_workers=sum(server.workers for server in servers),
        worker_slots=slots,
        slots_key=min(slots_bounds, key=slots_bounds.__getitem__, default="engine"),
        engine=", ".join(engine.urls) or ("vllm" if engine.vllm else "embedded"),
        binds=min(bounds, key=bounds.__getitem__),
    )


def core_spec(config: RunConfig, plan: Plan) -> CoreSpec:
    trainer = config.trainer or config.external_trainer
    assert trainer is not None, "loading a run file sets one of the two"
    return CoreSpec(
        orchestrator=config.orchestrator,
        ratios={env.id: env.ratio for env in config.env},
        max_steps=config.max_steps,
        max_outstanding=plan.max_outstanding,
        payload_bytes=config.payload.budget_mb << 20,
        micro_batch_tokens=trainer.micro_batch_tokens,
        ranks=trainer.ranks,
        num_workers=max(1, plan.num_workers),
        retries=config.retries,
        difficulty=config.difficulty,
        filters=config.filters,
        eval=config.eval,
    )


def _check_sizes(config: RunConfig) -> None:
    settings, engine = config.orchestrator, config.engine
    batch_size, group_size = settings.batch_size, settings.group_size
    if batch_size % group_size:
        raise ConfigError(
            f"'orchestrator.batch_size' = {batch_size} is not a multiple of "
            f"'orchestrator.group_size' = {group_size}: a batch holds whole groups"
        )
    sizes = {"orchestrator.group_size": group_size}
    if config.eval:
        sizes["eval.num_rollouts"] = config.eval.num_rollouts
    for key, size in sizes.items():
        if size > settings.max_in_flight:
            raise ConfigError(
                f"'{key}' = {size} is more than 'orchestrator.max_in_flight' = "
                f"{settings.max_in_flight}: the rollouts of one task could never run"
            )
    max_tokens, urls = config.sampling.max_tokens, engine.urls
    max_context = engine.embedded_context if engine.is_embedded else engine.max_context
    if max_context and max_tokens >= max_context:
        raise ConfigError(
            f"'sampling.max_tokens' = {max_tokens} leaves no room for a prompt in "
            f"'engine.max_context' = {max_context}"
        )
    if len(set(urls)) < len(urls):
        raise ConfigError(f"'engine.external.url' = {list(urls)!r} names an engine twice")


def _check_envs(config: RunConfig) -> None:
    names = [env_name(env.id) for env in config.env]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(
            f"two environments of 'env' are called {', '.join(twice)}; names must differ"
        )
    ids = [env.id for env in config.env]
    for env_id in (config.eval and config.eval.envs) or ():
        if env_id not in ids:
            raise ConfigError(
                f"'eval.envs' names '{env_id}', but the run's environments are {ids}"
            )
    for index, env in enumerate(config.env):
        _check_env(config, env, f"env.{index}")


def _check_env(config: RunConfig, env: EnvConfig, where: str) -> None:
    server = env.external
    if server is None:
        workers, min_workers = env.local.workers, env.local.min_workers
        if min_workers and min_workers > workers:
            raise ConfigError(
                f"'{where}.server.min_workers' = {min_workers} is more than '{where}.server.workers' = "
                f"{workers}"
            )
        return
    check_connect(server.address, server.keys, f"{where}.external")
    if config.payload.store == "files" and not server.shares_payload:
        folder = Path(config.output_dir) / config.name / "payload"
        raise ConfigError(
            f"'payload.store' = 'files', but the server at '{where}.external.address' does not write "
            "into this run's folder: set 'payload.store' to 'frames', or start the server with "
            f"'--payload files --payload-dir {folder}' and set '{where}.external.shares_payload' = true"
        )


def _check_difficulty(config: RunConfig) -> None:
    easy_at, hard_at = config.difficulty.easy_at, config.difficulty.hard_at
    if easy_at is not None and hard_at is not None and hard_at >= easy_at:
        raise ConfigError(
            f"'difficulty.hard_at' = {hard_at:g} is not below 'difficulty.easy_at' = {easy_at:g}: tasks "
            "would be hard and easy at once"
        )


def _check_transport(config: RunConfig) -> None:
    zmq = config.transport.zmq
    if zmq is None:
        return
    check_bind(zmq.bind, zmq.keys, "'transport.zmq.bind' =", "'transport.zmq.keys'")
    if config.trainer is not None:
        if bool(zmq.keys) != bool(zmq.trainer_keys):
            missing = "trainer_keys" if zmq.keys else "keys"
            raise ConfigError(
                f"'transport.zmq.{missing}' is missing: 'transport.zmq.keys' are the orchestrator's "
                "(keys/server of 'rollway keys new keys'), 'transport.zmq.trainer_keys' the trainer's "
                "(keys/client)"
            )
    elif zmq.trainer_keys or zmq.payload != "files":
        raise ConfigError(
            "'transport.zmq.trainer_keys' and 'transport.zmq.payload' are for the trainer that rollway "
            "starts; your own passes both to rollway.transport.open_batches"
        )
