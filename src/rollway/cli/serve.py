"""`rollway serve`: serves one environment to runs that name its address."""

import asyncio
from pathlib import Path
from typing import Annotated, Literal, cast

from msgspec.structs import replace
from typer import Option, echo

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
from ..launch.engine import choose_speech
from ..launch.run import ROUTER
from ..launch.watch import STATUS_EVERY_S, ServerWatch
from ..loop.processes.child import log_to
from ..loop.processes.part import start_part
from ..loop.watch.run import run
from ..model.hub import find_folder
from ..model.shape import check_routes
from ..observe.console import Screen
from ..wire.keys import read_server_keys
from .checks import Args, Env, RendererName, Template, checked, json_object
from .stopping import STOPPED, cancel_on_sigterm, exit_for

EngineUrl = Annotated[
    list[str],
    Option(
        help="Address of the engine, such as http://gpu-box:8000. Repeat the option for several engines "
        "that serve the same model."
    ),
]
Model = Annotated[
    str,
    Option(
        "--model",
        "-m",
        help="The engine's model: a folder with config.json and tokenizer.json, or its name on the "
        "Hugging Face hub. Its weights are not needed here.",
    ),
]
Bind = Annotated[
    str,
    Option(
        help="Where clients connect: tcp://127.0.0.1:PORT for this machine only, tcp://0.0.0.0:PORT for "
        "others too, which needs --keys. The port * takes any free one."
    ),
]
Keys = Annotated[
    str, Option(help="Folder of the server's keys: F/server, after 'rollway keys new F'.")
]
Workers = Annotated[int, Option(help="How many processes run the environment.")]
Concurrency = Annotated[int, Option(help="Rollouts that one worker runs at the same time.")]
Routes = Annotated[
    bool | None,
    Option(help="Ask the engine which experts it chose (by default if the model has some)."),
]
FillIds = Annotated[
    bool,
    Option(
        "--fill-ids",
        help="Serve also with a chat endpoint that takes no token ids: ids that its replies lack are "
        "made from their text. The run file needs engine.external.fill_ids, too.",
    ),
]
Payload = Annotated[
    str,
    Option(
        help="How token columns reach the run: 'frames' sends them with each rollout; 'files' writes "
        "them to --payload-dir, on a file system that run and server share."
    ),
]
PayloadDir = Annotated[
    str, Option(help="With --payload files: the run's payload folder, outputs/RUN/payload.")
]
Deadline = Annotated[float, Option(help="Seconds after which a rollout fails.")]
Seed = Annotated[int, Option(help="Seed of the environment's task order.")]
LogDir = Annotated[Path, Option(help="Folder for the logs, one file per process.")]


def serve(
    env: Env,
    engine_url: EngineUrl,
    model: Model,
    bind: Bind = ANY_LOOPBACK_PORT,
    keys: Keys = "",
    workers: Workers = 2,
    concurrency: Concurrency = 64,
    args: Args = "{}",
    renderer: RendererName = "auto",
    template: Template = "{}",
    routes: Routes = None,
    fill_ids: FillIds = False,
    payload: Payload = "frames",
    payload_dir: PayloadDir = "",
    rollout_deadline_s: Deadline = 300.0,
    seed: Seed = 0,
    log_dir: LogDir = Path("logs"),
) -> None:
    """Serve an environment to runs, on this machine or on others, until Ctrl-C.

    A run uses this server if its run file has 'external = { address = "tcp://…" }' in the section of the
    environment. The environment's code then runs only here. Clients on other machines need keys: see
    'rollway keys'.
    """
    check_bind(bind, keys)
    if keys:
        read_server_keys(Path(keys))
    folder = find_folder(model, needs_weights=False)
    check_routes(folder, routes)
    options = json_object("--template", template)
    server = ServerConfig(
        workers=workers, concurrency=concurrency, rollout_deadline_s=rollout_deadline_s
    )
    urls = tuple(engine_url)
    spec = RouterSpec(
        env=EnvConfig(id=env, args=json_object("--args", args), server=checked(server)),
        model=ModelConfig(path=folder, renderer=renderer, template=options),
        engine=EngineConfig(
            routes=routes, external=ExternalEngineConfig(url=urls, fill_ids=fill_ids)
        ),
        engine_urls=urls,
        payload=_payload(payload, payload_dir),
        payload_dir=payload_dir,
        log_dir=str(log_dir),
        seed=seed,
        watch=WatchSpec(),
        bind=bind,
        keys=keys or None,
        reports_to_parent=True,
    )
    run_server(spec)


def run_server(spec: RouterSpec) -> None:
    """Run the server in the foreground and print its state; Ctrl-C and SIGTERM end all its processes."""
    logs = Path(spec.log_dir)
    logs.mkdir(parents=True, exist_ok=True)
    log_to(logs / "serve.log", "serve")
    screen = Screen()
    try:
        run("serve", spec.watch, lambda _: _serve(spec, logs, screen))
    except STOPPED as stopped:
        echo("Stopped.", err=True)
        raise exit_for(stopped) from None


async def _serve(spec: RouterSpec, logs: Path, screen: Screen) -> None:
    cancel_on_sigterm()
    name = f"{env_name(spec.env.id)}.router"
    watch = ServerWatch(screen, name, spec.env.local.workers)
    spec = replace(spec, speaks=await choose_speech(spec.engine, screen.line))
    async with (
        asyncio.TaskGroup() as tasks,
        start_part(name, ROUTER, spec, log=logs / f"{name}.log") as router,
    ):
        listening = tasks.create_task(router.listen(watch.health.hear, lambda body: None))
        address = await router.ready()
        screen.line(f"Serving '{spec.env.id}' at {address} (Ctrl-C ends it); logs in {logs}")
        printing = tasks.create_task(watch.print_status(STATUS_EVERY_S))
        await listening
        printing.cancel()


def _payload(store: str, folder: str) -> PayloadConfig:
    chosen = PayloadConfig(store=cast(Literal["files", "frames"], store))
    config = checked(chosen, store="payload")
    if config.store == "files" and not (folder and Path(folder).is_dir()):
        raise ConfigError(
            "--payload files needs --payload-dir: the folder 'payload' of the run that will connect; "
            f"'{folder}' is not a folder"
        )
    if config.store == "frames" and folder:
        raise ConfigError(
            "--payload-dir is for --payload files; with frames, the run writes the payload itself"
        )
    return config
