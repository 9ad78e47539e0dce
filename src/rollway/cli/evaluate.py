"""`rollway eval`: evaluates a model on an environment, without training."""

import os
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec.structs import replace
from typer import Exit, Option, echo

from ..config.credentials import without_credentials
from ..config.sections import ModelConfig
from ..envs.in_lane import EnvSpec
from ..envs.registry import check_exists
from ..errors import ConfigError, ModelError
from ..evals.driver import Evaluation
from ..evals.folder import EvalFolder, latest_folder, new_folder, root_of
from ..evals.progress import EvalProgress
from ..evals.run import evaluate as run_evaluation
from ..evals.spec import EvalRuntime, EvalSpec
from ..loop.processes.child import log_to
from ..loop.watch.run import LoopWatch, run, run_unwatched
from ..model.folder import check_loadable
from ..model.hub import find_folder
from ..observe.console import Screen
from ..preflight.checks import EnvToCheck, ModelToCheck, check_model_and_envs
from ..preflight.machine import check_engines, check_room_on_disk, check_urls
from ..records.text import visible
from ..records.turn import Sampling
from .checks import (
    Args,
    Env,
    RendererName,
    Template,
    TrustRemoteCode,
    json_object,
    need_torch,
)
from .stopping import STOPPED, cancel_on_sigterm, exit_for

ALL_FAILED = 1
OUTPUTS = Path("outputs")


class SplitName(StrEnum):
    EVAL = "eval"
    TRAIN = "train"


Model = Annotated[
    str,
    Option(
        "--model",
        "-m",
        help="The model's name at --engine-url. Without --engine-url: a model folder, or a name on the "
        "Hugging Face hub.",
    ),
]
NumTasks = Annotated[int, Option("--num-tasks", "-n", min=1, help="Use the first N tasks.")]
NumRollouts = Annotated[int, Option("--rollouts", "-r", min=1, help="Rollouts of each task.")]
Concurrency = Annotated[
    int, Option("--concurrency", "-c", min=1, help="Rollouts that run at the same time.")
]
EngineUrl = Annotated[
    str,
    Option(
        help="An OpenAI-compatible endpoint, such as https://host/v1. Without it, the embedded engine "
        "serves the model folder."
    ),
]
SplitOption = Annotated[SplitName, Option(help="Which tasks of the environment to use.")]
Temperature = Annotated[float, Option(min=0, help="Sampling temperature; 0 is greedy.")]
TopP = Annotated[
    float,
    Option(
        min=1e-6, max=1, help="Sample from the likeliest tokens that add up to this share."
    ),
]
MaxTokens = Annotated[
    int, Option(min=1, help="Most tokens that the model samples in one turn.")
]
Seed = Annotated[int, Option(min=0, help="Seed of the tasks and of the embedded engine.")]
DEFAULT_KEY_VAR = "OPENAI_API_KEY"
KeyVar = Annotated[
    str | None,
    Option(
        help="Environment variable with the endpoint's API key; default: OPENAI_API_KEY, if it is set."
    ),
]
Tokens = Annotated[
    bool,
    Option(
        "--tokens",
        help="Send token ids instead of messages, to an engine that takes them (vLLM, SGLang). Needs "
        "--tokenizer.",
    ),
]
Tokenizer = Annotated[
    str, Option(help="With --tokens: a folder with the model's tokenizer.json.")
]
CorrectAt = Annotated[float, Option(help="A rollout passes with this reward or more.")]
Output = Annotated[
    Path | None,
    Option(help="Folder for the results; default: outputs/eval/ENV/MODEL/<time>."),
]
Resume = Annotated[
    bool,
    Option(
        "--resume",
        help="Continue the evaluation in --output, or the newest with these options.",
    ),
]
Workers = Annotated[int, Option(min=1, help="How many processes run the environment.")]
Deadline = Annotated[float, Option(min=1, help="Seconds after which a rollout fails.")]
MaxContext = Annotated[
    int, Option(min=2, help="Embedded engine: most tokens of prompt and reply together.")
]


def evaluate(
    env: Env,
    model: Model,
    num_tasks: NumTasks = 100,
    rollouts: NumRollouts = 1,
    concurrency: Concurrency = 32,
    engine_url: EngineUrl = "",
    args: Args = "{}",
    split: SplitOption = SplitName.EVAL,
    temperature: Temperature = 1.0,
    top_p: TopP = 1.0,
    max_tokens: MaxTokens = 1024,
    seed: Seed = 0,
    key_var: KeyVar = None,
    tokens: Tokens = False,
    tokenizer: Tokenizer = "",
    renderer: RendererName = "auto",
    template: Template = "{}",
    correct_at: CorrectAt = 1.0,
    output: Output = None,
    resume: Resume = False,
    workers: Workers = 2,
    rollout_deadline_s: Deadline = 600.0,
    max_context: MaxContext = 4096,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Evaluate a model on an environment: mean rewards with standard errors, avg@k and pass@k.

    Every rollout is written to results.jsonl as soon as it ends. Ctrl-C prints the results so far, and
    --resume continues without repeating rollouts. The exit code is 1 if every rollout failed.
    """
    spec = EvalSpec(
        env=env,
        args=json_object("--args", args),
        split=split.value,
        num_tasks=num_tasks,
        num_rollouts=rollouts,
        model=model,
        engine_url=without_credentials(engine_url),
        speaks="messages" if engine_url and not tokens else "tokens",
        tokenizer=tokenizer,
        renderer=renderer,
        template=json_object("--template", template),
        sampling=Sampling(max_tokens, temperature, top_p),
        seed=seed,
    )
    spec = complete(spec, max_context, trusts_code=trust_remote_code)
    limits = concurrency, workers, rollout_deadline_s, max_context
    runtime = EvalRuntime(*limits, chosen_key_var(key_var), trust_remote_code)
    folder = choose_folder(spec, output, resume=resume)
    check_evaluation(spec, runtime, folder, resume=resume)
    with folder.opened(spec, resume=resume) as previous:
        screen = Screen()
        progress = EvalProgress(spec, previous, screen, correct_at)
        run_and_show(Evaluation(spec, runtime, folder, previous, progress, screen))


def chosen_key_var(key_var: str | None) -> str:
    """Return the variable with the key. One that the user names must be set."""
    if key_var and not os.environ.get(key_var):
        raise ConfigError(
            f"--key-var {key_var}: this environment variable is not set; export it first"
        )
    return key_var or DEFAULT_KEY_VAR


def complete(spec: EvalSpec, max_context: int, *, trusts_code: bool) -> EvalSpec:
    """Check the options, and add the folder of the model that the embedded engine serves."""
    if spec.engine_url:
        check_external(spec)
        return spec
    check_embedded(spec, max_context)
    try:
        return replace(spec, tokenizer=find_folder(spec.model, trusts_code=trusts_code))
    except ModelError as error:
        hint = "for a model that is served elsewhere, give --engine-url"
        raise ModelError(f"{error}; {hint}") from None


def check_external(spec: EvalSpec) -> None:
    check_urls((spec.engine_url,), "--engine-url")
    if spec.speaks == "tokens":
        if not spec.tokenizer:
            raise ConfigError(
                "--tokens needs --tokenizer: a folder with the model's tokenizer.json"
            )
    elif spec.tokenizer or spec.renderer != "auto" or spec.template:
        raise ConfigError(
            "--tokenizer, --renderer and --template are for --tokens: without it, the endpoint turns "
            "messages into tokens"
        )


def check_embedded(spec: EvalSpec, max_context: int) -> None:
    if spec.tokenizer:
        raise ConfigError(
            "--tokenizer is for --engine-url: the embedded engine reads the tokenizer in --model"
        )
    need_torch("the embedded engine")
    max_tokens = spec.sampling.max_tokens
    if max_tokens >= max_context:
        raise ConfigError(
            f"--max-tokens {max_tokens} leaves no room for a prompt in --max-context {max_context}"
        )


def check_evaluation(
    spec: EvalSpec, runtime: EvalRuntime, folder: EvalFolder, *, resume: bool
) -> None:
    """Find mistakes before an engine is started or a file written."""
    folder.check(spec, resume=resume)
    check_exists(spec.env)
    if not spec.engine_url:
        check_loadable(spec.tokenizer)
    env = EnvSpec(spec.env, msgspec.json.encode(spec.args), spec.seed)
    model, is_embedded = None, not spec.engine_url
    if spec.speaks == "tokens":
        config = ModelConfig(
            path=spec.tokenizer,
            renderer=spec.renderer,
            template=spec.template,
            trust_remote_code=runtime.trust_remote_code,
        )
        max_context = runtime.max_context if is_embedded else None
        model = ModelToCheck(config, max_context, is_loaded=is_embedded)
    run_unwatched(
        check_model_and_envs(
            model, [EnvToCheck(env, (spec.split,))], lambda text: echo(text, err=True)
        )
    )
    check_room_on_disk(folder.path, 0, trains=False)
    if spec.engine_url:
        check_engines((spec.engine_url,))


def choose_folder(spec: EvalSpec, output: Path | None, *, resume: bool) -> EvalFolder:
    if output is not None:
        return EvalFolder(output)
    root = root_of(spec, OUTPUTS)
    return latest_folder(root, spec) if resume else new_folder(root, datetime.now())


def run_and_show(evaluation: Evaluation) -> None:
    folder, progress, screen = evaluation.folder, evaluation.progress, evaluation.screen
    num_done, total = progress.num_done, evaluation.spec.total
    to_continue = f"To continue, repeat the command with --resume --output {folder.path}"
    log_to(folder.logs / "eval.log", "eval")
    if num_done:
        screen.line(f"{num_done} of {total} rollouts are done already")
    try:
        if num_done < total:
            run(
                "eval",
                evaluation.runtime.watch,
                lambda watch: run_until_sigterm(evaluation, watch),
            )
    except STOPPED as stopped:
        show(progress, screen)
        echo(f"Stopped. {to_continue}", err=True)
        raise exit_for(stopped) from None
    except Exception:  # say how to keep the results, whatever the error is
        screen.close()
        if scored := progress.num_scored:
            echo(f"{scored} of {total} rollouts are done. {to_continue}", err=True)
        raise
    show(progress, screen)
    echo(f"Results are in {folder.path}")
    if not progress.num_scored:
        raise Exit(ALL_FAILED)


def show(progress: EvalProgress, screen: Screen) -> None:
    screen.close()
    for line in progress.table():
        echo(visible(line))


async def run_until_sigterm(evaluation: Evaluation, watch: LoopWatch) -> None:
    """Run the evaluation; SIGTERM ends it like Ctrl-C does."""
    cancel_on_sigterm()
    await run_evaluation(evaluation, watch)
