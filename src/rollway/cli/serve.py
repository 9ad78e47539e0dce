"""`rollway serve`: one environment's server on its own, for runs that point at it."""

import asyncio
from pathlib import Path
from typing import Annotated, Literal, cast

import typer

from ..config.address import ANY_LOOPBACK_PORT, check_bind
from ..config.plan import env_name
from ..config.sections import (
    EngineConfig,
    EnvConfig,
    ExternalEngineConfig,
    ModelConfig,
    PayloadConfig,
    ServerConfig,
)
from ..config.specs import RouterSpec, WatchSpec
from ..errors import ConfigError
from ..launch.run import ROUTER
from ..launch.watch import STATUS_EVERY_S, ServerWatch
from ..loop.processes.child import log_to
from ..loop.processes.part import start_part
from ..loop.watch.run import run
from ..model.folder import check_folder
from ..observe.console import Screen
from ..wire.keys import read_server_keys
from .checks import checked, json_object
from .stopping import STOPPED, cancel_on_sigterm, exit_for

Env = Annotated[
    str, typer.Argument(help="Environment: a name of 'rollway envs', a module, or path/to/env.py.")
]
Engine = Annotated[
    list[str],
    typer.Option(
        help="Address of the engine its workers ask, such as http://gpu-box:8000 (repeatable: engines "
        "that serve the same model)."
    ),
]
Model = Annotated[
    Path, typer.Option(help="Folder of the engine's model: config.json and tokenizer.json are read.")
]
Bind = Annotated[
    str,
    typer.Option(
        help="Where clients connect: tcp://127.0.0.1:PORT for this machine, tcp://0.0.0.0:PORT for "
        "others too (then --keys is required); * takes a free port."
    ),
]
Keys = Annotated[
    str, typer.Option(help="Folder of the server's keys: F/server of 'rollway keys new F'.")
]
Workers = Annotated[int, typer.Option(help="Worker processes.")]
Concurrency = Annotated[int, typer.Option(help="Rollouts at a time in one worker.")]
Args = Annotated[
    str, typer.Option(help="""Arguments of the environment, as JSON: '{"split": "hard"}'.""")
]
RendererName = Annotated[
    str, typer.Option(help="Message renderer of the model family, as in a run file.")
]
Template = Annotated[
    str, typer.Option(help="""Options of the renderer, as JSON: '{"enable_thinking": false}'.""")
]
Routes = Annotated[
    bool, typer.Option(help="Ask the engine for expert choices; --no-routes for dense models.")
]
Payload = Annotated[
    str,
    typer.Option(
        help="How columns reach the run: 'frames' with each rollout's record, or 'files' in "
        "--payload-dir, where run and server share a file system."
    ),
]
PayloadDir = Annotated[
    str, typer.Option(help="With 'files': the payload folder of the run, outputs/RUN/payload.")
]
Deadline = Annotated[
    float, typer.Option(help="A rollout that runs longer fails with boundary 'deadline'.")
]
Seed = Annotated[int, typer.Option(help="Seed of the environment's task order.")]
LogDir = Annotated[Path, typer.Option(help="Folder for one log per process.")]


def serve(
    env: Env, engine: Engine, model: Model, bind: Bind = ANY_LOOPBACK_PORT, keys: Keys = "",
    workers: Workers = 2, concurrency: Concurrency = 64, args: Args = "{}",
    renderer: RendererName = "auto", template: Template = "{}", routes: Routes = True,
    payload: Payload = "frames", payload_dir: PayloadDir = "", rollout_deadline_s: Deadline = 300.0,
    seed: Seed = 0, log_dir: LogDir = Path("logs"),
) -> None:  # fmt: skip
    """Serve an environment to runs elsewhere, until Ctrl-C: a router and its workers.

    A run file points at it with 'address = "tcp://…"' in its env section instead of starting a server
    itself. The environment's code runs here and nowhere else. Beyond this machine, clients need keys:
    'rollway keys new'.
    """
    check_bind(bind, keys)
    if keys:
        read_server_keys(Path(keys))
    check_folder(str(model))
    server = ServerConfig(
        workers=workers, concurrency=concurrency, rollout_deadline_s=rollout_deadline_s
    )
    part = RouterSpec(
        env=EnvConfig(id=env, args=json_object("--args", args), server=checked(server)),
        model=ModelConfig(
            path=str(model), renderer=renderer, template=json_object("--template", template)
        ),
        engine=EngineConfig(routes=routes, external=ExternalEngineConfig(url=tuple(engine))),
        engine_urls=tuple(engine),
        payload=_payload(payload, payload_dir),
        payload_dir=payload_dir,
        log_dir=str(log_dir),
        seed=seed,
        watch=WatchSpec(),
        bind=bind,
        keys=keys or None,
        reports_to_parent=True,
    )
    serve_part(part)


def serve_part(part: RouterSpec) -> None:
    """In the foreground, with a line now and then; Ctrl-C and SIGTERM end all of its processes."""
    logs = Path(part.log_dir)
    logs.mkdir(parents=True, exist_ok=True)
    log_to(logs / "serve.log", "serve")
    screen = Screen()
    try:
        run("serve", part.watch, lambda _: _serve(part, logs, screen))
    except STOPPED as stopped:
        typer.echo("Stopped.", err=True)
        raise exit_for(stopped) from None


async def _serve(part: RouterSpec, logs: Path, screen: Screen) -> None:
    cancel_on_sigterm()
    name = f"{env_name(part.env.id)}.router"
    watch = ServerWatch(screen, part.env.local.workers)
    async with (
        asyncio.TaskGroup() as tasks,
        start_part(name, ROUTER, part, log=logs / f"{name}.log") as router,
    ):
        listening = tasks.create_task(router.listen(watch.health.hear, lambda body: None))
        screen.line(
            f"Serving '{part.env.id}' at {await router.ready()} (Ctrl-C ends it); logs in {logs}"
        )
        telling = tasks.create_task(watch.print_status(STATUS_EVERY_S))
        await listening
        telling.cancel()


def _payload(store: str, folder: str) -> PayloadConfig:
    chosen = PayloadConfig(store=cast(Literal["files", "frames"], store))
    config = checked(chosen, store="payload")
    if config.store == "files" and not (folder and Path(folder).is_dir()):
        raise ConfigError(
            f"--payload files needs --payload-dir: the folder 'payload' of the run that will connect; "
            f"'{folder}' is no folder"
        )
    if config.store == "frames" and folder:
        raise ConfigError("--payload-dir is for --payload files; frames are written by the run")
    return config
