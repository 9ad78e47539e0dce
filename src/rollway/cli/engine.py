"""`rollway engine`: serves a model with the embedded engine, without a run."""

import asyncio
from typing import Annotated

from typer import Option, echo

from ..config.sections import EmbeddedEngineConfig, EngineConfig, ModelConfig
from ..config.specs import EngineSpec, WatchSpec
from ..launch.engine import ENGINE
from ..loop.processes.part import start_part
from ..loop.watch.run import run
from ..model.hub import find_folder
from .checks import RendererName, TrustRemoteCode, checked, need_torch


def engine(
    model: Annotated[
        str,
        Option(
            "--model",
            "-m",
            help="A causal language model: a folder, or its name on the Hugging Face hub.",
        ),
    ],
    port: Annotated[int, Option(help="Port at 127.0.0.1; 0 takes any free port.")] = 8000,
    max_batch: Annotated[
        int, Option(help="Requests that are decoded at the same time.")
    ] = 128,
    max_context: Annotated[
        int, Option(help="Most tokens of prompt and reply together.")
    ] = 4096,
    renderer: RendererName = "auto",
    threads: Annotated[int, Option(help="How many CPU threads torch uses.")] = 1,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Serve a model with the embedded engine, over vLLM's version of the OpenAI API, until Ctrl-C."""
    need_torch("the embedded engine")
    folder = find_folder(model, trusts_code=trust_remote_code)
    embedded = checked(
        EmbeddedEngineConfig(port=port or None, max_batch=max_batch, threads=threads)
    )
    spec = EngineSpec(
        model=ModelConfig(
            path=folder, renderer=renderer, trust_remote_code=trust_remote_code
        ),
        engine=checked(EngineConfig(max_context=max_context, embedded=embedded)),
        weights=folder,
        version=0,
        seed=0,
        watch=WatchSpec(),
    )
    run("rollway-engine", spec.watch, lambda _: _serve(spec))


async def _serve(spec: EngineSpec) -> None:
    async with asyncio.TaskGroup() as tasks, start_part("engine", ENGINE, spec) as started:
        listening = tasks.create_task(started.listen(lambda stats: None, lambda body: None))
        echo(f"Serving {spec.model.path} at {await started.ready()}/v1 (Ctrl-C ends it)")
        await listening
