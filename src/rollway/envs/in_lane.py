"""Functions that run user code in a process lane: taking tasks, scoring, plain tools and rollouts.

A lane's process finds them by name, so they stand at the top level of a module.
"""

from contextlib import suppress
from functools import cache
from typing import Any

import msgspec

from ..records.scores import finite_number, one_for_each
from ..records.task import Task
from .environment import Environment
from .plain_chat import AskWorker, ChatState, EndPlainCode, PlainChat
from .registry import build_environment
from .rewards import scorers
from .rollout import Rollout
from .tools import tool_specs


class EnvSpec(msgspec.Struct, frozen=True):
    """All that a process needs to build an environment: its id, its args as JSON, and the seed."""

    id: str
    args: bytes
    seed: int
    source: bytes | None = None
    """The text of its file when the run began. None: what the file holds now."""

    def build(self) -> Environment:
        args: dict[str, Any] = msgspec.json.decode(self.args)
        env = build_environment(self.id, args, self.source)
        env.seed = self.seed
        return env

    def shared(self) -> Environment:
        """Return this process's copy, which is built on the first call."""
        return _shared(self)


@cache
def _shared(spec: EnvSpec) -> Environment:
    return spec.build()


def load_shared(spec: EnvSpec) -> None:
    """Build this process's copy ahead of the first rollout it scores."""
    spec.shared()


class _Cursor:
    def __init__(self, spec: EnvSpec, split: str) -> None:
        env = spec.build()
        self.tasks = iter(env.eval_tasks() if split == "eval" else env.tasks())
        self.position = 0


_cursors: dict[tuple[EnvSpec, str], _Cursor] = {}


def take_tasks(
    spec: EnvSpec, start: int, count: int, split: str = "train"
) -> tuple[Task, ...]:
    """Return `count` tasks from `start`, or fewer if they end. Going back builds a new environment."""
    cursor = _cursors.pop((spec, split), None)
    if cursor is None or cursor.position > start:
        cursor = _Cursor(spec, split)
    taken: list[Task] = []
    for task in cursor.tasks:
        cursor.position += 1
        if not isinstance(task, Task):
            raise TypeError(f"tasks() returned a {type(task).__name__}, not an rw.Task")
        if cursor.position > start:
            taken.append(_decoded(task))
        if len(taken) == count:
            break
    # only if tasks() did not raise: a generator that has raised looks as if it had ended
    _cursors[spec, split] = cursor
    return tuple(taken)


def _decoded(task: Task) -> Task:
    """Encode and decode the task, as happens on its way to the orchestrator: only decoding checks the
    types of its fields."""
    try:
        return msgspec.msgpack.decode(msgspec.msgpack.encode(task), type=Task)
    except (TypeError, ValueError, OverflowError, msgspec.MsgspecError) as error:
        advice = (
            "" if isinstance(task.id, str) else "; the id of a task is a text, such as '0'"
        )
        raise TypeError(f"task {task.id!r} cannot be sent: {error}{advice}") from None


def score(spec: EnvSpec, task: Task, rollout: Rollout) -> dict[str, float]:
    """Return the environment's plain (not async) rewards and metrics, by name."""
    env = spec.shared()
    scores = {}
    for scorer in scorers(type(env)):
        if not scorer.is_async and not scorer.is_group:
            name = scorer.name
            scores[name] = finite_number(name, getattr(env, name)(task, rollout))
    return scores


def score_group(
    spec: EnvSpec, task: Task, rollouts: tuple[Rollout, ...]
) -> dict[str, list[float]]:
    """Return the environment's plain group rewards by name: a number for each rollout."""
    env = spec.shared()
    scores = {}
    for scorer in scorers(type(env)):
        if scorer.is_group and not scorer.is_async:
            name = scorer.name
            values = getattr(env, name)(task, list(rollouts))
            scores[name] = one_for_each(name, values, len(rollouts), "rewards")
    return scores


def call_plain_tool(spec: EnvSpec, task: Task, name: str, arguments: dict[str, Any]) -> Any:
    """Call a plain tool on a toolset of this process, which is never opened."""
    for toolset in spec.shared().tools(task):
        if any(tool.name == name for tool in tool_specs(type(toolset))):
            return getattr(toolset, name)(**arguments)
    raise LookupError(f"tools() of task {task.id!r} has no tool '{name}' in this process")


def run_plain(
    spec: EnvSpec, method: str, task: Task, state: ChatState, ask: AskWorker
) -> ChatState:
    """Run a plain `rollout` or update of the environment, and return the chat as it was left."""
    chat = PlainChat(ask, state)
    with suppress(EndPlainCode):  # the worker, which asked for it, knows why
        getattr(spec.shared(), method)(task, chat)
    return chat.state
