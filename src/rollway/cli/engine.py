"""`rollway engine`: the embedded engine on its own."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from ..config.sections import EmbeddedEngineConfig, EngineConfig, ModelConfig
from ..config.specs import EngineSpec, WatchSpec
from ..launch.engine import ENGINE
from ..loop.processes.part import start_part
from ..loop.watch.run import run
from ..model.folder import check_folder
from .checks import checked, need_torch


def engine(
    model: Annotated[Path, typer.Argument(help="Folder of a Hugging Face causal LM.")],
    port: Annotated[int, typer.Option(help="Port on 127.0.0.1; 0 takes a free one.")] = 8000,
    max_batch: Annotated[int, typer.Option(help="Requests decoded at a time.")] = 128,
    max_context: Annotated[int, typer.Option(help="Tokens of prompt and reply.")] = 2048,
    renderer: Annotated[str, typer.Option(help="Message renderer for chat requests.")] = "auto",
    threads: Annotated[int, typer.Option(help="Torch threads.")] = 1,
) -> None:
    """Serve a model in vLLM's dialect of the OpenAI API, until Ctrl-C."""
    check_folder(str(model))
    need_torch("the embedded engine")
    part = EngineSpec(
        model=ModelConfig(path=str(model), renderer=renderer),
        engine=checked(
            EngineConfig(
                max_context=max_context,
                embedded=EmbeddedEngineConfig(port=port or None, max_batch=max_batch, threads=threads),
            )
        ),
        weights=str(model),
        version=0,
        seed=0,
        watch=WatchSpec(),
    )
    run("rollway-engine", part.watch, lambda _: _serve(part))


async def _serve(part: EngineSpec) -> None:
    async with asyncio.TaskGroup() as tasks, start_part("engine", ENGINE, part) as started:
        listening = tasks.create_task(started.listen(lambda stats: None, lambda body: None))
        typer.echo(f"Serving {part.model.path} at {await started.ready()}/v1 (Ctrl-C ends it)")
        await listening
