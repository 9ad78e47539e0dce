"""`rollway engine`: serves a model with the embedded engine or vLLM, without a run."""

import asyncio
import os
from typing import Annotated

from typer import Argument, Context, Option, echo

from ..config.sections import (
    ENGINE_KEY_VAR,
    EmbeddedEngineConfig,
    EngineConfig,
    ModelConfig,
    VllmConfig,
)
from ..config.specs import EngineSpec, VllmSpec, WatchSpec
from ..errors import ConfigError
from ..inference.vllm_server.command import find_program
from ..launch.engine import ENGINE, HOST, VLLM, make_engine_key
from ..loop.processes.part import start_part
from ..loop.processes.port import bind_port
from ..loop.watch.run import run
from ..model.hub import find_folder
from .checks import RendererName, TrustRemoteCode, checked, need_torch

OF_EMBEDDED = ("max_batch", "renderer", "threads")
OF_VLLM = ("vllm_command",)
Threads = Annotated[int, Option(help="How many CPU threads the embedded engine uses.")]
IsOpen = Annotated[
    bool,
    Option(
        "--open",
        help="Demand no key: every user of this machine can use the engine and change its weights.",
    ),
]


def engine(
    context: Context,
    model: Annotated[
        str,
        Argument(
            help="A causal language model: a folder, or its name on the Hugging Face hub."
        ),
    ],
    vllm: Annotated[
        bool,
        Option("--vllm", help="Serve with vLLM, started with the flags that training needs."),
    ] = False,
    vllm_command: Annotated[
        str, Option(help="The program of vLLM, which may lie in another venv.")
    ] = "vllm",
    port: Annotated[int, Option(help="Port at 127.0.0.1; 0 takes any free port.")] = 8000,
    max_batch: Annotated[
        int, Option(help="Requests that the embedded engine decodes at the same time.")
    ] = 128,
    max_context: Annotated[
        int | None,
        Option(
            help="Most tokens of prompt and reply together. Without it the embedded engine takes 4096, "
            "and vLLM what the model is made for."
        ),
    ] = None,
    renderer: RendererName = "auto",
    threads: Threads = 1,
    trust_remote_code: TrustRemoteCode = False,
    is_open: IsOpen = False,
) -> None:
    """Serve a model over vLLM's version of the OpenAI API, until Ctrl-C.

    The embedded engine is for small models and tests. All requests must have the key in the environment
    variable ROLLWAY_ENGINE_KEY. If it is not set, a key is made up and printed. Runs, evaluations and
    servers send it if they are told its name: engine.external.key_var, --key-var.
    """
    check_options(context, vllm=vllm)
    choose_key(is_open=is_open)
    if vllm:
        find_program(vllm_command)
    else:
        need_torch("the embedded engine")
    folder = find_folder(model, trusts_code=trust_remote_code)
    source = ModelConfig(path=folder, renderer=renderer, trust_remote_code=trust_remote_code)
    if vllm:
        own = VllmConfig(command=vllm_command)
        config = checked(EngineConfig(max_context=max_context, vllm=own))
        with bind_port("--port", HOST, port or None) as bound:
            number = bound.getsockname()[1]
            _run(VllmSpec(source, config, 0, number, 0, None, WatchSpec()))
        return
    embedded = EmbeddedEngineConfig(port=port or None, max_batch=max_batch, threads=threads)
    config = checked(EngineConfig(max_context=max_context, embedded=checked(embedded)))
    _run(EngineSpec(source, config, folder, version=0, seed=0, watch=WatchSpec()))


def choose_key(*, is_open: bool) -> None:
    """Demand the key that is set, or one that is made up and printed."""
    if is_open:
        os.environ.pop(ENGINE_KEY_VAR, None)
    elif not os.environ.get(ENGINE_KEY_VAR):
        echo(f"The key of this engine: export {ENGINE_KEY_VAR}={make_engine_key()}")


def check_options(context: Context, *, vllm: bool) -> None:
    """Raise ConfigError for options that the chosen engine would ignore."""
    for option in OF_EMBEDDED if vllm else OF_VLLM:
        source = context.get_parameter_source(option)
        if source is not None and source.name == "COMMANDLINE":
            name = option.replace("_", "-")
            other = "is for the embedded engine, not for" if vllm else "needs"
            raise ConfigError(f"--{name} {other} --vllm")


def _run(spec: EngineSpec | VllmSpec) -> None:
    run("rollway-engine", spec.watch, lambda _: _serve(spec))


async def _serve(spec: EngineSpec | VllmSpec) -> None:
    entry = VLLM if isinstance(spec, VllmSpec) else ENGINE
    async with asyncio.TaskGroup() as tasks, start_part("engine", entry, spec) as started:
        listening = tasks.create_task(started.listen(lambda stats: None, lambda body: None))
        echo(f"Serving {spec.model.path} at {await started.ready()}/v1 (Ctrl-C ends it)")
        await listening
