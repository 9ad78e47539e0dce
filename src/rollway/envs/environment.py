"""The base class of environments."""

import inspect
from collections.abc import Iterable

from ..errors import EnvironmentNotFound
from ..records.task import Task
from .chat import Chat
from .rewards import scorers


class Environment:
    """Where tasks come from, how a rollout goes, what it is worth.

    Write `tasks`, at least one `@rw.reward`, and `rollout` unless one question and one answer is all.
    """

    system_prompt: str = ""
    seed: int = 0
    """The run's seed, set before `tasks` is called."""

    def tasks(self) -> Iterable[Task]:
        """The tasks in training order; may be endless. Must give the same order for the same seed."""
        raise NotImplementedError

    async def rollout(self, task: Task, chat: Chat) -> None:
        """Hold the conversation. Every `await chat.say(…)` is recorded as a turn."""
        await chat.say(task.prompt)


def check(env: object, origin: str) -> Environment:
    """Refuse what cannot be run, before anything is started for it."""
    if not isinstance(env, Environment):
        raise EnvironmentNotFound(f"{origin} gave a {type(env).__name__}, not an rw.Environment")
    kind = type(env)
    if kind.tasks is Environment.tasks:
        raise EnvironmentNotFound(f"{origin}: {kind.__name__} has no tasks() method")
    if not inspect.iscoroutinefunction(kind.rollout):
        raise EnvironmentNotFound(f"{origin}: {kind.__name__}.rollout must be 'async def'")
    if not any(not one.is_metric for one in scorers(kind)):
        raise EnvironmentNotFound(f"{origin}: {kind.__name__} has no method marked @rw.reward")
    return env
