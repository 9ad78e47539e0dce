"""User code that runs in the process lane: taking tasks and scoring. Module-level, so that a lane's
process can find it; each process keeps its own copy of the environment."""

import math
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from typing import Any

import msgspec

from ..records.task import Task
from .environment import Environment
from .plain_chat import AskWorker, ChatState, EndPlainCode, PlainChat
from .registry import load_environment
from .rewards import scorers
from .rollout import Rollout
from .tools import tool_specs


class EnvSpec(msgspec.Struct, frozen=True):
    """What it takes to build an environment anywhere: id, JSON of its args, seed."""

    id: str
    args: bytes
    seed: int

    def build(self) -> Environment:
        args: dict[str, Any] = msgspec.json.decode(self.args)
        env = load_environment(self.id, **args)
        env.seed = self.seed
        return env

    def shared(self) -> Environment:
        """This process's own copy, built when it is first asked for."""
        return _shared(self)


@cache
def _shared(spec: EnvSpec) -> Environment:
    return spec.build()


def load_shared(spec: EnvSpec) -> None:
    """Build this process's copy ahead of the first rollout it scores."""
    spec.shared()


class _Cursor:
    """An environment's tasks and how many of them were taken."""

    def __init__(self, spec: EnvSpec, split: str) -> None:
        env = spec.build()
        self.tasks: Iterator[Task] = iter(env.eval_tasks() if split == "eval" else env.tasks())
        self.position = 0


_cursors: dict[tuple[EnvSpec, str], _Cursor] = {}


def take_tasks(spec: EnvSpec, start: int, count: int, split: str = "train") -> tuple[Task, ...]:
    """Tasks `start` to `start + count`; fewer when there are no more. Going back starts over."""
    cursor = _cursors.get((spec, split))
    if cursor is None or cursor.position > start:
        cursor = _cursors[spec, split] = _Cursor(spec, split)
    taken: list[Task] = []
    for task in cursor.tasks:
        cursor.position += 1
        if not isinstance(task, Task):
            raise TypeError(f"tasks() gave a {type(task).__name__}, not an rw.Task")
        if cursor.position > start:
            taken.append(_checked(task))
        if len(taken) == count:
            break
    return tuple(taken)


def _checked(task: Task) -> Task:
    """The task as it will arrive: structs do not check their fields, the wire does."""
    try:
        return msgspec.msgpack.decode(msgspec.msgpack.encode(task), type=Task)
    except (TypeError, ValueError, OverflowError, msgspec.MsgspecError) as error:
        raise TypeError(f"task {task.id!r} cannot be sent: {error}") from None


def score(spec: EnvSpec, task: Task, rollout: Rollout) -> dict[str, float]:
    """The environment's plain (not async) rewards and metrics, by name."""
    env = spec.shared()
    return {
        one.name: as_score(one.name, getattr(env, one.name)(task, rollout))
        for one in scorers(type(env))
        if not one.is_async and not one.is_group
    }


def score_group(spec: EnvSpec, task: Task, rollouts: tuple[Rollout, ...]) -> dict[str, list[float]]:
    """The environment's plain group rewards: for each, a number for each rollout."""
    env = spec.shared()
    return {
        one.name: as_scores(one.name, getattr(env, one.name)(task, list(rollouts)), len(rollouts))
        for one in scorers(type(env))
        if one.is_group and not one.is_async
    }


def call_plain_tool(spec: EnvSpec, task: Task, name: str, arguments: dict[str, Any]) -> Any:
    """A plain tool, on an unopened toolset of this process's own."""
    for toolset in spec.shared().tools(task):
        if any(one.name == name for one in tool_specs(type(toolset))):
            return getattr(toolset, name)(**arguments)
    raise LookupError(f"tools() of task {task.id!r} has no tool '{name}' in this process")


def run_plain(spec: EnvSpec, method: str, task: Task, state: ChatState, ask: AskWorker) -> ChatState:
    """A plain `rollout` or update of the environment; the chat as it leaves it."""
    chat = PlainChat(ask, state)
    with suppress(EndPlainCode):  # who asked for it knows why
        getattr(spec.shared(), method)(task, chat)
    return chat.state


def as_scores(name: str, values: Any, count: int) -> list[float]:
    """One finite float for each rollout, or an error that names the group reward."""
    try:
        numbers = list(values)
    except TypeError:
        raise TypeError(f"{name} returned {values!r}, not a list of numbers") from None
    if len(numbers) != count:
        raise ValueError(f"{name} returned {len(numbers)} rewards for {count} rollouts")
    return [as_score(name, value) for value in numbers]


def as_score(name: str, value: Any) -> float:
    """A finite float, or an error that names the reward."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} returned {value!r}, not a number") from None
    if not math.isfinite(number):
        raise ValueError(f"{name} returned {number}")
    return number
