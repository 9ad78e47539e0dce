"""`rollway eval`: an environment against any endpoint, without training."""

from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ..errors import ConfigError, ModelError
from ..evals.folder import EvalFolder, latest_folder, new_folder, root_of
from ..evals.progress import EvalProgress
from ..evals.result import EvalResult, ResultKey
from ..evals.run import EvalRuntime
from ..evals.run import evaluate as run_evaluation
from ..evals.spec import EvalSpec
from ..loop.processes.child import log_to
from ..loop.watch.run import LoopWatch, run
from ..model.folder import check_folder
from ..observe.console import Screen
from ..records.turn import Sampling
from .checks import json_object, need_torch
from .stopping import STOPPED, cancel_on_sigterm, exit_for

ALL_FAILED = 1
OUTPUTS = Path("outputs")


class Split(StrEnum):
    EVAL = "eval"
    TRAIN = "train"


Env = Annotated[str, typer.Argument(help="Environment: a name, package.module, or path/to/file.py.")]
Model = Annotated[
    str, typer.Option("--model", "-m", help="Model's name at --base-url; without that, a model folder.")
]
NumTasks = Annotated[int, typer.Option("--num-tasks", "-n", min=1, help="Tasks, from the first on.")]
NumRollouts = Annotated[int, typer.Option("--rollouts", "-r", min=1, help="Rollouts of each task.")]
Concurrency = Annotated[int, typer.Option("--concurrency", "-c", min=1, help="Rollouts at a time.")]
BaseUrl = Annotated[
    str, typer.Option(help="OpenAI-compatible endpoint (https://host/v1); empty starts our own engine.")
]
Args = Annotated[str, typer.Option(help="Arguments of the environment, a JSON object.")]
SplitOption = Annotated[Split, typer.Option(help="Which of the environment's tasks.")]
Temperature = Annotated[float, typer.Option(min=0, help="0 always takes the likeliest token.")]
TopP = Annotated[float, typer.Option(min=1e-6, max=1, help="Draw from so much of the distribution.")]
MaxTokens = Annotated[int, typer.Option(min=1, help="Tokens of one turn.")]
Seed = Annotated[int, typer.Option(min=0, help="Of the environment's tasks, and of our own engine.")]
ApiKeyVar = Annotated[str, typer.Option(help="Environment variable with the endpoint's key.")]
Tokens = Annotated[
    bool, typer.Option("--tokens", help="The endpoint takes token ids: vLLM, SGLang. Needs --tokenizer.")
]
Tokenizer = Annotated[str, typer.Option(help="With --tokens: folder with the model's tokenizer.json.")]
RendererName = Annotated[str, typer.Option(help="Of messages into tokens: qwen3, glm5, …")]
Template = Annotated[str, typer.Option(help="Options of the renderer, a JSON object.")]
PassAt = Annotated[float, typer.Option(help="A rollout passes with this reward or more.")]
Output = Annotated[Path | None, typer.Option(help="Folder; by default outputs/eval/ENV/MODEL/<time>.")]
Resume = Annotated[
    bool,
    typer.Option("--resume", help="Go on in --output, or in the latest that was asked for the same."),
]
Workers = Annotated[int, typer.Option(min=1, help="Worker processes of the environment.")]
Deadline = Annotated[float, typer.Option(min=1, help="Seconds one rollout may take.")]
MaxContext = Annotated[int, typer.Option(min=2, help="Of our own engine: tokens of prompt and reply.")]


def evaluate(
    env: Env, model: Model, num_tasks: NumTasks = 100, rollouts: NumRollouts = 1,
    concurrency: Concurrency = 32, base_url: BaseUrl = "", args: Args = "{}",
    split: SplitOption = Split.EVAL, temperature: Temperature = 1.0, top_p: TopP = 1.0,
    max_tokens: MaxTokens = 1024, seed: Seed = 0, api_key_var: ApiKeyVar = "OPENAI_API_KEY",
    tokens: Tokens = False, tokenizer: Tokenizer = "", renderer: RendererName = "auto",
    template: Template = "{}", pass_at: PassAt = 1.0, output: Output = None, resume: Resume = False,
    workers: Workers = 2, deadline: Deadline = 600.0, max_context: MaxContext = 4096,
) -> None:  # fmt: skip
    """Evaluate a model on an environment, and print means with standard errors, avg@k and pass@k.

    Every rollout is written to results.jsonl as it ends. Ctrl-C prints what there is; --resume goes on
    without repeating what is done. Exits with 1 if every rollout failed.
    """
    check_model(
        model, base_url, tokens=tokens, tokenizer=tokenizer, renderer=renderer, template=template
    )
    if not base_url and max_tokens >= max_context:
        raise ConfigError(f"--max-tokens {max_tokens} leaves no room for a prompt in --max-context "
                          f"{max_context}")  # fmt: skip
    asked = EvalSpec(
        env=env,
        args=json_object("--args", args),
        split=split.value,
        num_tasks=num_tasks,
        num_rollouts=rollouts,
        model=model,
        base_url=base_url,
        speaks="messages" if base_url and not tokens else "tokens",
        tokenizer=tokenizer if base_url else model,
        renderer=renderer,
        template=json_object("--template", template),
        sampling=Sampling(max_tokens, temperature, top_p),
        seed=seed,
    )
    how = EvalRuntime(
        concurrency=concurrency, workers=workers, deadline_s=deadline, max_context=max_context,
        key_var=api_key_var,
    )  # fmt: skip
    folder = choose_folder(asked, output, resume=resume)
    with folder.opened(asked, resume=resume) as known:
        try:
            run_it(asked, how, folder, known, pass_at)
        finally:
            folder.drop_payload()


def check_model(
    model: str, base_url: str, *, tokens: bool, tokenizer: str, renderer: str, template: str
) -> None:
    """Refuse options that do not go together."""
    if not base_url:
        if tokenizer:
            raise ConfigError("--tokenizer is for --base-url: our own engine reads that of -m")
        try:
            check_folder(model)
        except ModelError as error:
            raise ModelError(f"{error}; a model that is served elsewhere needs --base-url") from None
        need_torch("the embedded engine")
    elif tokens:
        if not tokenizer:
            raise ConfigError("--tokens needs --tokenizer: a folder with the model's tokenizer.json")
    elif tokenizer or renderer != "auto" or template != "{}":
        raise ConfigError(
            "--tokenizer, --renderer and --template are for --tokens: an endpoint of messages does that "
            "by itself"
        )


def choose_folder(asked: EvalSpec, output: Path | None, *, resume: bool) -> EvalFolder:
    if output is not None:
        return EvalFolder(output)
    root = root_of(asked, OUTPUTS)
    return latest_folder(root, asked) if resume else new_folder(root, datetime.now())


def run_it(
    asked: EvalSpec,
    how: EvalRuntime,
    folder: EvalFolder,
    known: dict[ResultKey, EvalResult],
    pass_at: float,
) -> None:
    """The evaluation, with its progress on the screen and its table at the end."""
    log_to(folder.logs / "eval.log", "eval")
    screen = Screen()
    progress = EvalProgress(asked, known, screen, pass_at)
    if progress.num_done:
        screen.line(f"{progress.num_done} of {asked.total} rollouts are done already")
    try:
        if progress.num_done < asked.total:
            run("eval", how.watch, lambda me: job(asked, how, folder, known, progress, screen, me))
    except STOPPED as stopped:
        show(progress, screen)
        typer.echo(f"Stopped. The same command with --resume --output {folder.path} goes on", err=True)
        raise exit_for(stopped) from None
    except Exception:  # whatever ends it, what is done is not lost
        screen.close()
        if progress.num_scored:
            typer.echo(
                f"{progress.num_scored} of {asked.total} rollouts are done; the same command with "
                f"--resume --output {folder.path} goes on", err=True,
            )  # fmt: skip
        raise
    show(progress, screen)
    typer.echo(f"Results are in {folder.path}")
    if not progress.num_scored:
        raise typer.Exit(ALL_FAILED)


def show(progress: EvalProgress, screen: Screen) -> None:
    screen.close()
    for line in progress.table():
        typer.echo(line)


async def job(
    asked: EvalSpec, how: EvalRuntime, folder: EvalFolder, known: dict[ResultKey, EvalResult], progress: EvalProgress,
    screen: Screen, me: LoopWatch,
) -> None:  # fmt: skip
    """SIGTERM ends it like Ctrl-C does."""
    cancel_on_sigterm()
    await run_evaluation(asked, how, folder, known, progress, screen, me)
