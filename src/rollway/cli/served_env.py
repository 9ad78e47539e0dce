"""What `rollway serve` serves: an environment of a run file, which options override, or of options."""

from pathlib import Path
from typing import Any, Literal, cast

from msgspec import Struct
from msgspec.structs import replace

from ..config.address import IPC, socket_in
from ..config.load import load
from ..config.plan import env_name
from ..config.sections import (
    EngineConfig,
    EnvConfig,
    ExternalEngineConfig,
    ModelConfig,
    PayloadConfig,
    RunConfig,
    ServerConfig,
)
from ..errors import ConfigError, did_you_mean
from .checks import checked

HOST = "http://127.0.0.1"


class ServedEnv(Struct, frozen=True, kw_only=True):
    """All that decides how an environment is served."""

    env: EnvConfig
    model: ModelConfig
    engine: EngineConfig
    payload: PayloadConfig = PayloadConfig(store="frames")
    payload_dir: str = ""
    bind: str | None = None
    seed: int = 0
    output_dir: str = "outputs"
    is_from_file: bool = False

    @property
    def folder(self) -> Path:
        return Path(self.output_dir) / "serve" / env_name(self.env.id)

    @property
    def address(self) -> str:
        """Where clients connect: at a unix socket in the server's folder, if nothing else is given."""
        return self.bind or socket_in(self.folder)


class ServeOptions(Struct, frozen=True, kw_only=True):
    """Options of the command line; None if they were not given."""

    engine_url: tuple[str, ...] | None = None
    key_var: str | None = None
    fill_ids: bool | None = None
    routes: bool | None = None
    model: str | None = None
    renderer: str | None = None
    template: dict[str, Any] | None = None
    args: dict[str, Any] | None = None
    workers: int | None = None
    concurrency: int | None = None
    rollout_deadline_s: float | None = None
    payload: str | None = None
    payload_dir: str | None = None
    bind: str | None = None
    seed: int | None = None


def from_run_file(config: RunConfig, name: str | None) -> ServedEnv:
    """Take over everything that the run file says of one environment, and of how it is run."""
    env = _choose(config, name)
    external = env.external
    shares = bool(external and external.shares_payload)
    run_dir = Path(config.output_dir) / config.name
    return ServedEnv(
        env=EnvConfig(id=env.id, args=env.args, server=env.server or ServerConfig()),
        model=config.model,
        engine=_running_engine(config.engine),
        payload=replace(config.payload, store="files" if shares else "frames"),
        payload_dir=str(run_dir / "payload") if shares else "",
        bind=_bind_of(external.address) if external else None,
        seed=config.seed,
        output_dir=config.output_dir,
        is_from_file=True,
    )


def _choose(config: RunConfig, name: str | None) -> EnvConfig:
    by_name = {env_name(env.id): env for env in config.env}
    by_name |= {env.id: env for env in config.env}
    names = ", ".join(env_name(env.id) for env in config.env)
    if name is None:
        if len(config.env) > 1:
            raise ConfigError(
                f"the run file has several environments: choose one with --env ({names})"
            )
        return config.env[0]
    if name not in by_name:
        hint = did_you_mean(name, by_name)
        raise ConfigError(
            f"--env {name}: the run file has no such environment{hint}; it has {names}"
        )
    return by_name[name]


def _running_engine(engine: EngineConfig) -> EngineConfig:
    """Return the engine as a server must see it: running already, at an address. An engine that the run
    starts itself has one only if the run file names its port."""
    urls, key_var = engine.urls, engine.key_var
    if engine.embedded and engine.embedded.port:
        urls = (f"{HOST}:{engine.embedded.port}",)
    if engine.vllm and (port := engine.vllm.port):
        urls = tuple(f"{HOST}:{port + replica}" for replica in range(engine.vllm.replicas))
    external = engine.external or ExternalEngineConfig(url=urls or ("",), key_var=key_var)
    return replace(engine, embedded=None, vllm=None, external=replace(external, url=urls))


def _bind_of(address: str) -> str:
    """Return where to bind so that a run that connects to `address` finds the server."""
    host = address.removeprefix("tcp://").rpartition(":")[0]
    if address.startswith(IPC) or host in ("127.0.0.1", "localhost", "[::1]"):
        return address
    return f"tcp://0.0.0.0:{address.rpartition(':')[2]}"


def with_options(served: ServedEnv, options: ServeOptions) -> ServedEnv:
    """Let options win over the run file, and check what they say."""
    engine = served.engine
    external = engine.external
    assert external is not None
    external = _changed(
        external, url=options.engine_url, key_var=options.key_var, fill_ids=options.fill_ids
    )
    server = _changed(
        served.env.local, workers=options.workers, concurrency=options.concurrency,
        rollout_deadline_s=options.rollout_deadline_s,
    )  # fmt: skip
    model = _changed(
        served.model, path=options.model, renderer=options.renderer, template=options.template
    )
    store = cast(Literal["files", "frames"] | None, options.payload)
    payload_dir = served.payload_dir if options.payload_dir is None else options.payload_dir
    if store == "frames" and options.payload_dir is None:
        payload_dir = ""
    changed = replace(
        served,
        env=replace(
            served.env,
            args=served.env.args if options.args is None else options.args,
            server=checked(server),
        ),
        model=model,
        engine=_changed(replace(engine, external=external), routes=options.routes),
        payload=checked(_changed(served.payload, store=store), store="payload"),
        payload_dir=payload_dir,
        bind=options.bind or served.bind,
        seed=served.seed if options.seed is None else options.seed,
    )
    _check_complete(changed)
    return changed


def _changed(config: Any, **values: Any) -> Any:
    given = {key: value for key, value in values.items() if value is not None}
    return replace(config, **given)


def _check_complete(served: ServedEnv) -> None:
    external, folder = served.engine.external, served.payload_dir
    if external is None or not any(external.urls):
        raise ConfigError(
            "where is the engine? Give --engine-url; in a run file that starts its engine itself, set "
            "'engine.embedded.port' or 'engine.vllm.port', so that its address is known"
        )
    if not served.model.path:
        raise ConfigError("which model does the engine serve? Give --model")
    if served.payload.store == "files" and not (folder and Path(folder).is_dir()):
        raise ConfigError(
            "--payload files needs --payload-dir: the folder 'payload' of the run that will connect; "
            f"'{folder}' is not a folder"
        )
    if served.payload.store == "frames" and folder:
        raise ConfigError(
            "--payload-dir is for --payload files; with frames, the run writes the payload itself"
        )


def from_options(env: str, options: ServeOptions) -> ServedEnv:
    """An environment that is named on the command line, without a run file."""
    external = ExternalEngineConfig(url=options.engine_url or ("",))
    return ServedEnv(
        env=EnvConfig(id=env, server=ServerConfig()),
        model=ModelConfig(path=""),
        engine=EngineConfig(external=external),
    )


def find_served(
    env: str, name: str | None, sets: list[str], options: ServeOptions
) -> ServedEnv:
    """Read the run file if `env` is one; else `env` names an environment."""
    if env.endswith(".toml"):
        return with_options(from_run_file(load(Path(env), sets), name), options)
    if name is not None or sets:
        given = "--env" if name is not None else "--set"
        raise ConfigError(f"{given} is for a run file: rollway serve run.toml {given} …")
    return with_options(from_options(env, options), options)
