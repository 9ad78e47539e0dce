"""What follows from a config: sizes, bounds and paths, computed once and shown by `--dry-run`."""

import re
from pathlib import Path

from msgspec import Struct

from ..errors import ConfigError
from .address import ANY_LOOPBACK_PORT, check_bind, check_connect
from .sections import EnvConfig, RunConfig


class Plan(Struct, frozen=True):
    """Derived values of a run. Pure: the same config gives the same plan on any machine."""

    run_dir: str
    groups_per_batch: int
    max_outstanding: int
    """Rollouts dispatched and not yet trained or dropped, at most."""
    max_in_flight: int
    num_workers: int
    worker_slots: int
    """Rollouts all workers can run at a time."""
    engine: str
    binds: str
    """Which bound limits how many rollouts run at a time."""


def env_name(id: str) -> str:
    """An environment's name as files and processes carry it."""
    stem = Path(id).stem if id.endswith(".py") else id
    return re.sub(r"[^A-Za-z0-9_-]+", "-", stem).strip("-") or "env"


def plan(config: RunConfig) -> Plan:
    """Derive the plan, and refuse combinations that could never train."""
    wants = config.orchestrator
    _check(config)
    started = [env for env in config.env if not env.address]
    outstanding = wants.batch_size * (1 + wants.max_off_policy_steps)
    slots = sum(env.workers * env.concurrency for env in started)
    bounds = {
        "orchestrator.max_in_flight": wants.max_in_flight,
        "orchestrator.batch_size × (1 + max_off_policy_steps)": outstanding,
    }
    if len(started) == len(config.env):
        bounds["env.workers × env.concurrency"] = slots
    if not config.engine.urls:
        bounds["engine.max_batch"] = config.engine.max_batch
    return Plan(
        run_dir=str(Path(config.output_dir) / config.name),
        groups_per_batch=wants.batch_size // wants.group_size,
        max_outstanding=outstanding,
        max_in_flight=wants.max_in_flight,
        num_workers=sum(env.workers for env in started),
        worker_slots=slots,
        engine=", ".join(config.engine.urls) or "embedded",
        binds=min(bounds, key=lambda name: bounds[name]),
    )


def _check(config: RunConfig) -> None:
    wants = config.orchestrator
    if config.engine.speaks == "messages":
        raise ConfigError(
            "'engine.speaks' = 'messages': a chat endpoint gives no token ids, and nothing can be "
            "trained without; leave it at 'tokens' (vLLM, SGLang, embedded), or use 'rollway eval'"
        )
    if wants.batch_size % wants.group_size:
        raise ConfigError(
            f"'orchestrator.batch_size' = {wants.batch_size} is not a multiple of "
            f"'orchestrator.group_size' = {wants.group_size}: a batch holds whole groups"
        )
    if wants.max_in_flight < wants.group_size:
        raise ConfigError(
            f"'orchestrator.max_in_flight' = {wants.max_in_flight} is below "
            f"'orchestrator.group_size' = {wants.group_size}: no group could ever run"
        )
    if config.sampling.max_tokens >= config.engine.max_context:
        raise ConfigError(
            f"'sampling.max_tokens' = {config.sampling.max_tokens} leaves no room for a prompt in "
            f"'engine.max_context' = {config.engine.max_context}"
        )
    if len(set(config.engine.urls)) < len(config.engine.urls):
        raise ConfigError(f"'engine.url' = {list(config.engine.urls)!r} names an engine twice")
    if config.warmup and config.warmup.topk > config.warmup.num_experts:
        raise ConfigError(
            f"'warmup.topk' = {config.warmup.topk} is more than 'warmup.num_experts' = "
            f"{config.warmup.num_experts}"
        )
    _check_evals(config)
    _check_envs(config)
    _check_transport(config)


def _check_evals(config: RunConfig) -> None:
    wants = config.eval
    if not wants.every:
        return
    if wants.num_rollouts > config.orchestrator.max_in_flight:
        raise ConfigError(
            f"'eval.num_rollouts' = {wants.num_rollouts} is more than 'orchestrator.max_in_flight' = "
            f"{config.orchestrator.max_in_flight}: the rollouts of one task could never run"
        )
    known = [env.id for env in config.env]
    for id in wants.envs:
        if id not in known:
            raise ConfigError(f"'eval.envs' names '{id}', but the run's environments are {known}")


def _check_envs(config: RunConfig) -> None:
    for index, env in enumerate(config.env):
        if env.min_workers > env.workers:
            raise ConfigError(
                f"'env.{index}.min_workers' = {env.min_workers} is more than 'env.{index}.workers' = "
                f"{env.workers}, the most there may be"
            )
    names = [env_name(env.id) for env in config.env]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"two environments of 'env' are called {', '.join(twice)}; names must differ")
    for index, env in enumerate(config.env):
        _check_served(config, env, f"env.{index}")


def _check_served(config: RunConfig, env: EnvConfig, where: str) -> None:
    """What a server that others run requires of the run file."""
    if not env.address:
        if env.keys or env.shares_payload:
            key = "keys" if env.keys else "shares_payload"
            raise ConfigError(f"'{where}.{key}' is for a server at '{where}.address', which is empty")
        return
    check_connect(env.address, env.keys, where)
    if env.args:
        raise ConfigError(
            f"'{where}.args' = {env.args!r} would not reach the server at '{where}.address': give them "
            "to 'rollway serve --args'"
        )
    if config.payload.store == "files" and not env.shares_payload:
        folder = Path(config.output_dir) / config.name / "payload"
        raise ConfigError(
            f"'payload.store' = 'files', but the server at '{where}.address' does not write into this "
            "run's folder: set 'payload.store' to 'frames', or start the server with '--payload files "
            f"--payload-dir {folder}' and set '{where}.shares_payload' = true"
        )


def _check_transport(config: RunConfig) -> None:
    wants, is_ours = config.transport, not config.trainer.external
    if wants.manifests == "files":
        given = {"payload": wants.payload != "files", "bind": wants.bind != ANY_LOOPBACK_PORT,
                 "keys": wants.keys, "trainer_keys": wants.trainer_keys}  # fmt: skip
        for key in [key for key, is_given in given.items() if is_given]:
            raise ConfigError(f"'transport.{key}' is for 'transport.manifests' = 'zmq'; it is 'files'")
        return
    check_bind(wants.bind, wants.keys, "'transport.bind' =", "'transport.keys'")
    if is_ours and bool(wants.keys) != bool(wants.trainer_keys):
        missing = "trainer_keys" if wants.keys else "keys"
        raise ConfigError(
            f"'transport.{missing}' is empty: 'transport.keys' are the orchestrator's (keys/server of "
            "'rollway keys new keys'), 'transport.trainer_keys' the trainer's (keys/client)"
        )
    for key in ("payload", "trainer_keys"):
        if not is_ours and getattr(wants, key) not in ("", "files"):
            raise ConfigError(
                f"'transport.{key}' is for the trainer that is started here; with 'trainer.external' "
                "yours says so when it connects (rollway.transport.open_batches)"
            )
