"""User code that runs in the process lane: taking tasks and scoring. Module-level, so that a lane's
process can find it; each process keeps its own copy of the environment."""

import math
from collections.abc import Iterator
from functools import cache
from typing import Any

import msgspec

from ..records.task import Task
from .environment import Environment
from .registry import load_environment
from .rewards import scorers
from .rollout import Rollout


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


@cache
def _shared(spec: EnvSpec) -> Environment:
    return spec.build()


def load_shared(spec: EnvSpec) -> None:
    """Build this process's copy ahead of the first rollout it scores."""
    _shared(spec)


class _Cursor:
    """An environment's tasks and how many of them were taken."""

    def __init__(self, spec: EnvSpec) -> None:
        self.tasks: Iterator[Task] = iter(spec.build().tasks())
        self.position = 0


_cursors: dict[EnvSpec, _Cursor] = {}


def take_tasks(spec: EnvSpec, start: int, count: int) -> tuple[Task, ...]:
    """Tasks `start` to `start + count`; fewer when there are no more. Going back starts over."""
    cursor = _cursors.get(spec)
    if cursor is None or cursor.position > start:
        cursor = _cursors[spec] = _Cursor(spec)
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
    env = _shared(spec)
    return {
        one.name: as_score(one.name, getattr(env, one.name)(task, rollout))
        for one in scorers(type(env))
        if not one.is_async
    }


def as_score(name: str, value: Any) -> float:
    """A finite float, or an error that names the reward."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} returned {value!r}, not a number") from None
    if not math.isfinite(number):
        raise ValueError(f"{name} returned {number}")
    return number
