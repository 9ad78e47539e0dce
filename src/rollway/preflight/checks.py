"""Examines the model and the environments of a command at the same time, each in its own process."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from time import monotonic
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from ..config.sections import ModelConfig
from ..envs.in_lane import EnvSpec
from ..errors import (
    ConfigError,
    DatasetError,
    EnvironmentInvalid,
    EnvironmentNotFound,
    LaneError,
    LaneRaised,
    LaneTimeout,
    ModelError,
    RollwayError,
)
from ..loop.lanes.lanes import ProcessLane
from ..records.task import Message, Split
from .in_lane import (
    EnvFacts,
    PromptFacts,
    examine_env,
    examine_model,
    examine_prompt,
    may_use_wandb,
)

DEADLINE_S = 300.0
"""An environment may load a large dataset before it gives its first task."""
WANDB_DEADLINE_S = 60.0
SAY_EVERY_S = 10.0
T = TypeVar("T")
Say = Callable[[str], None]

_KINDS: dict[str, type[RollwayError]] = {
    kind.__name__: kind
    for kind in (
        ConfigError, DatasetError, EnvironmentInvalid, EnvironmentNotFound, ModelError
    )
}  # fmt: skip


class ModelToCheck(Struct, frozen=True):
    model: ModelConfig
    max_context: int | None = None
    """Tokens of prompt and reply together; None if only the engine knows."""
    is_built: bool = True
    """Without it the folder does not exist yet: a warm-up will build the model."""
    is_loaded: bool = False
    """Transformers will load it, for the embedded engine or trainer."""


class EnvToCheck(Struct, frozen=True):
    spec: EnvSpec
    splits: tuple[Split, ...] = ("train",)
    may_be_empty: bool = False


async def check_model_and_envs(
    model: ModelToCheck | None, envs: Sequence[EnvToCheck], say: Say
) -> None:
    """Raise the first mistake, the model's before those of environments. Without a model only the
    environments are examined: a chat endpoint takes messages as they are."""
    async with AsyncExitStack() as stack:
        running: list[asyncio.Task[Any]] = []

        def begin(
            title: str, lane: ProcessLane, work: Coroutine[Any, Any, T]
        ) -> "asyncio.Task[T]":
            task = asyncio.create_task(_watched(title, lane, work, say))
            running.append(task)
            return task

        try:
            model_lane = await stack.enter_async_context(ProcessLane("model-check", 1))
            model_check = begin("the model", model_lane, _examine_model(model_lane, model))
            env_checks = []
            for env in envs:
                lane = await stack.enter_async_context(ProcessLane(f"check-{env.spec.id}", 1))
                title = f"environment '{env.spec.id}'"
                env_checks.append(begin(title, lane, _examine_env(lane, env)))
            await model_check
            for env, env_check in zip(envs, env_checks, strict=True):
                facts = await env_check
                if model is not None:
                    await _check_prompts(model_lane, model, env.spec.id, facts)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)


async def check_wandb(project: str) -> None:
    """Refuse a project of W&B without a login for it. Its package is imported in a lane."""
    async with ProcessLane("wandb-check", 1) as lane:
        try:
            may_use = await lane.call(may_use_wandb, deadline_s=WANDB_DEADLINE_S)
        except LaneError as error:
            raise ConfigError(f"W&B cannot be used: {error}") from None
    if not may_use:
        raise ConfigError(
            f"'metrics.wandb_project' = '{project}', but W&B has no login here: run 'wandb login', set "
            "WANDB_API_KEY, or set WANDB_MODE=offline to keep the steps on this machine"
        )


async def _watched(
    title: str, lane: ProcessLane, work: Coroutine[Any, Any, T], say: Say
) -> T:
    """Say now and then that a check still runs, and at which line it is."""
    start_s, task = monotonic(), asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait([task], timeout=SAY_EVERY_S))[0]:
            where, waited_s = await lane.where(), monotonic() - start_s
            place = f", at {where}" if where else ""
            say(
                f"Still checking {title} after {waited_s:.0f} s (it may take {DEADLINE_S:g} s){place}"
            )
        return task.result()
    finally:
        task.cancel()


async def _examine_model(lane: ProcessLane, model: ModelToCheck | None) -> None:
    if model is None:
        return
    encoded = msgspec.json.encode(model.model)
    try:
        await lane.call(
            examine_model, encoded, model.is_built, model.is_loaded, deadline_s=DEADLINE_S
        )
    except LaneError as error:
        raise _explained(error, f"the model in '{model.model.path}'", ModelError) from None


async def _examine_env(lane: ProcessLane, env: EnvToCheck) -> EnvFacts:
    spec = env.spec
    try:
        return await lane.call(
            examine_env, spec, env.splits, env.may_be_empty, deadline_s=DEADLINE_S
        )
    except LaneError as error:
        raise _explained(error, f"environment '{spec.id}'", EnvironmentInvalid) from None


async def _check_prompts(
    lane: ProcessLane, model: ModelToCheck, env_id: str, facts: EnvFacts
) -> None:
    """Refuse tools that the policy would not see or could not call, and prompts that do not fit."""
    encoded = msgspec.json.encode(model.model)
    system = [Message("system", facts.system_prompt)] if facts.system_prompt else []
    said = facts.prompts or (("", "Hello"),)
    rendered = []
    for task_id, prompt in said:
        messages = (*system, Message("user", prompt))
        try:
            prompt_facts = await lane.call(
                examine_prompt, encoded, model.is_built, messages, facts.tools,
                deadline_s=DEADLINE_S,
            )  # fmt: skip
        except LaneError as error:
            origin = f"the first prompt of environment '{env_id}'"
            raise _explained(error, origin, ModelError) from None
        rendered.append((prompt_facts.num_tokens, task_id))
        _check_tools(model.model, env_id, facts, prompt_facts)
    num_tokens, task_id = min(rendered)
    if model.max_context and num_tokens >= model.max_context:
        which = f"of task '{task_id}' " if task_id else ""
        parts = " with its tools and system prompt" if facts.tools or system else ""
        raise ConfigError(
            f"the first prompt {which}of environment '{env_id}' has {num_tokens} tokens{parts}, and a "
            f"conversation may have {model.max_context}, so that no room is left for a reply; raise "
            "'engine.max_context' (--max-context), or use a model that takes longer texts"
        )


def _check_tools(
    model: ModelConfig, env_id: str, facts: EnvFacts, rendered: PromptFacts
) -> None:
    names = ", ".join(tool["function"]["name"] for tool in facts.tools)
    hidden = ", ".join(rendered.hidden_tools)
    parsers = ", ".join(rendered.tool_parsers)
    if rendered.hidden_tools:
        raise ConfigError(
            f"environment '{env_id}' has the tools {hidden}, but the chat template of the model in "
            f"'{model.path}' does not show the policy their names and parameters: name the model's "
            "family in 'model.renderer' (docs/models.md lists them), or use a template that shows tools"
        )
    if facts.tools and not rendered.reads_calls:
        raise ConfigError(
            f"environment '{env_id}' has the tools {names}, but renderer '{model.renderer}' finds no "
            "tool calls in replies: name the model's family in 'model.renderer' (--renderer), or set "
            "'model.renderer' to 'default' and 'model.template.tool_parser' (--template) to the syntax "
            f"of its calls ({parsers})"
        )


def _explained(error: LaneError, origin: str, kind: type[RollwayError]) -> RollwayError:
    """Return the error that the check raised in its process, or say how the process ended."""
    if isinstance(error, LaneRaised) and error.kind in _KINDS:
        return _KINDS[error.kind](error.text)
    if isinstance(error, LaneRaised):
        place = f", at {error.where}" if error.where else ""
        return kind(f"{origin} cannot be checked: {error}{place}")
    if isinstance(error, LaneTimeout):
        place = f"; it was at {error.where}" if error.where else ""
        return kind(f"{origin} was not ready within {DEADLINE_S:g} s{place}")
    return kind(f"{origin} ended the process that checked it: {error}")
