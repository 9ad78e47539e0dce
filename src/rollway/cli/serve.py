"""`rollway serve`: serves one environment to runs that name its address."""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec.structs import replace
from typer import Argument, Option, echo

from ..config.address import check_bind
from ..config.credentials import without_credentials
from ..config.plan import env_name
from ..config.specs import RouterSpec, WatchSpec
from ..config.terms import UNSET, terms_of_server
from ..envs.in_lane import EnvSpec
from ..envs.registry import check_exists
from ..errors import RunDirError
from ..launch.engine import choose_speech
from ..launch.run import ROUTER
from ..launch.watch import STATUS_EVERY_S, ServerWatch
from ..loop.processes.child import log_to
from ..loop.processes.leftovers import mark_folder
from ..loop.processes.part import start_part
from ..loop.watch.run import run, run_unwatched
from ..model.hub import find_folder
from ..model.shape import check_routes, read_shape
from ..observe.console import Screen
from ..preflight.checks import EnvToCheck, ModelToCheck, check_model_and_envs
from ..preflight.machine import (
    check_bind_port,
    check_engine_key,
    check_engines,
    check_open_files,
    check_urls,
    check_writable,
)
from ..rundir.rundir import lock_folder
from ..wire.keys import read_server_keys
from .checks import ARGS_HELP, RENDERER_HELP, TEMPLATE_HELP, Overrides, json_object
from .served_env import ServedEnv, ServeOptions, find_served
from .stopping import STOPPED, cancel_on_sigterm, exit_for

EnvOrRunFile = Annotated[
    str,
    Argument(
        help="A run file (run.toml), whose section of the environment is served; or an environment: a "
        "name of 'rollway envs', a module, or path/to/env.py."
    ),
]
EnvOption = Annotated[
    str | None,
    Option("--env", help="With a run file that has several environments: the one to serve."),
]
EngineUrl = Annotated[
    list[str] | None,
    Option(
        help="Address of the engine, such as http://gpu-box:8000. Repeat the option for several engines "
        "that serve the same model."
    ),
]
Model = Annotated[
    str | None,
    Option(
        "--model",
        "-m",
        help="The engine's model: a folder with config.json and tokenizer.json, or its name on the "
        "Hugging Face hub. Its weights are not needed here.",
    ),
]
ArgsOption = Annotated[str | None, Option(help=ARGS_HELP)]
Renderer = Annotated[str | None, Option(help=RENDERER_HELP)]
TemplateOption = Annotated[str | None, Option(help=TEMPLATE_HELP)]
KeyVar = Annotated[
    str | None, Option(help="Environment variable that holds the engine's API key.")
]
Bind = Annotated[
    str | None,
    Option(
        help="Where clients connect. Default: a unix socket in outputs/serve/ENV, which only this user "
        "can reach. tcp://127.0.0.1:PORT is for clients on this machine, tcp://0.0.0.0:PORT for others "
        "too; both need --keys. The port * takes any free one."
    ),
]
Keys = Annotated[
    str, Option(help="Folder of the server's keys: F/server, after 'rollway keys new F'.")
]
Workers = Annotated[
    int | None, Option(help="How many processes run the environment; default: 2.")
]
Concurrency = Annotated[
    int | None, Option(help="Rollouts that one worker runs at the same time; default: 64.")
]
Routes = Annotated[
    bool | None,
    Option(help="Ask the engine which experts it chose (by default if the model has some)."),
]
FillIds = Annotated[
    bool | None,
    Option(
        "--fill-ids/--no-fill-ids",
        help="Serve also with a chat endpoint that takes no token ids: ids that its replies lack are "
        "made from their text. The run file needs engine.external.fill_ids, too.",
    ),
]
Payload = Annotated[
    str | None,
    Option(
        help="How token columns reach the run: 'frames', the default, sends them with each rollout; "
        "'files' writes them to --payload-dir, on a file system that run and server share."
    ),
]
PayloadDir = Annotated[
    str | None,
    Option(help="With --payload files: the run's payload folder, outputs/RUN/payload."),
]
Deadline = Annotated[
    float | None, Option(help="Seconds after which a rollout fails; default: 300.")
]
Seed = Annotated[int | None, Option(help="Seed of the environment's task order; default: 0.")]
LogDir = Annotated[
    Path | None,
    Option(
        help="Folder for the logs, one file per process; default: outputs/serve/ENV/logs."
    ),
]


def serve(
    env: EnvOrRunFile,
    name: EnvOption = None,
    overrides: Overrides = None,
    engine_url: EngineUrl = None,
    key_var: KeyVar = None,
    model: Model = None,
    bind: Bind = None,
    keys: Keys = "",
    workers: Workers = None,
    concurrency: Concurrency = None,
    args: ArgsOption = None,
    renderer: Renderer = None,
    template: TemplateOption = None,
    routes: Routes = None,
    fill_ids: FillIds = None,
    payload: Payload = None,
    payload_dir: PayloadDir = None,
    rollout_deadline_s: Deadline = None,
    seed: Seed = None,
    log_dir: LogDir = None,
) -> None:
    """Serve an environment to runs, on this machine or on others, until Ctrl-C.

    With a run file, the environment is served as the run would run it: its arguments, deadlines and
    processes, the engine and its key, the renderer. Options override the file. A run uses this server if
    its run file has 'external = { address = "…" }' in the section of the environment, with the address
    that this command prints. The environment's code then runs only here. What run and server disagree on
    is refused when the run connects. A port needs keys: see 'rollway keys'.
    """
    options = ServeOptions(
        engine_url=tuple(map(without_credentials, engine_url)) if engine_url else None,
        key_var=key_var,
        fill_ids=fill_ids,
        routes=routes,
        model=model,
        renderer=renderer,
        template=None if template is None else json_object("--template", template),
        args=None if args is None else json_object("--args", args),
        workers=workers,
        concurrency=concurrency,
        rollout_deadline_s=rollout_deadline_s,
        payload=payload,
        payload_dir=payload_dir,
        bind=bind,
        seed=seed,
    )
    served = find_served(env, name, overrides or [], options)
    logs = log_dir or served.folder / "logs"
    served = check_served(served, keys, logs)
    run_server(router_spec(served, keys, logs))


def check_served(served: ServedEnv, keys: str, logs: Path) -> ServedEnv:
    """Find mistakes before a process is started or a file written. Return the model as a folder."""
    external, env = served.engine.external, served.env
    assert external is not None
    check_bind(served.address, keys)
    check_urls(external.urls, "--engine-url")
    folder = find_folder(served.model.path, needs_weights=False)
    check_routes(folder, served.engine.routes)
    model = replace(served.model, path=folder)
    check_exists(env.id)
    shape = read_shape(folder)
    limits = (served.engine.max_context, shape and shape.max_context)
    known = [limit for limit in limits if limit]
    checked_env = EnvToCheck(EnvSpec(env.id, msgspec.json.encode(env.args), served.seed))
    run_unwatched(
        check_model_and_envs(
            ModelToCheck(model, min(known, default=None)),
            [checked_env],
            lambda text: echo(text, err=True),
        )
    )
    check_bind_port("--bind", served.address)
    check_open_files("env.server.concurrency", env.local.concurrency)
    check_writable(logs)
    if keys:
        read_server_keys(Path(keys))
    check_engine_key(served.engine, "--key-var")
    check_engines(external.urls)
    return replace(served, model=model)


def router_spec(served: ServedEnv, keys: str, logs: Path) -> RouterSpec:
    env, model, engine, payload = served.env, served.model, served.engine, served.payload
    stored = payload.store, payload.durability
    return RouterSpec(
        env=env,
        model=model,
        engine=engine,
        engine_urls=engine.urls,
        payload=payload,
        payload_dir=served.payload_dir,
        log_dir=str(logs),
        seed=served.seed,
        watch=WatchSpec(),
        bind=served.address,
        keys=keys or None,
        reports_to_parent=True,
        terms=(UNSET if served.is_from_file else {})
        | terms_of_server(env, model, engine, served.seed, stored),
    )


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Mark the processes that start in the block, and end those that a killed server left in the same
    folder. A second server that uses the folder at the same time does neither."""
    with ExitStack() as stack:
        with suppress(RunDirError, OSError):
            stack.enter_context(lock_folder(folder, f"serves in {folder}"))
            mark_folder(folder)
        yield


def run_server(spec: RouterSpec) -> None:
    """Run the server in the foreground and print its state; Ctrl-C and SIGTERM end all its processes."""
    logs = Path(spec.log_dir)
    logs.mkdir(parents=True, exist_ok=True)
    log_to(logs / "serve.log", "serve")
    screen = Screen()
    try:
        with claimed(logs):
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
