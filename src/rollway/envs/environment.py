"""The base class of environments."""

import inspect
from collections.abc import Iterable, Sequence

from ..errors import EnvironmentNotFound
from ..records.task import Task
from .chat import Chat
from .marks import hooks
from .rewards import scorers
from .tools import Toolset


class Environment:
    """Where tasks come from, how a rollout goes, what it is worth.

    Write `tasks`, at least one `@rw.reward`, and `rollout` unless what it does is all you need.
    """

    system_prompt: str = ""
    max_turns: int = 0
    """Turns of a rollout, children included; the rollout ends there. 0 is no limit."""
    max_tokens: int = 0
    """Tokens the policy draws in a rollout, children included; the rollout ends at the first turn that
    reaches them. 0 is no limit."""
    seed: int = 0
    """The run's seed, set before `tasks` is called."""
    needs_whole_groups: bool = False
    """Whether rollouts of a group must run side by side in one worker, for tools of scope `group`. It is
    implied by @rw.group_reward."""

    def tasks(self) -> Iterable[Task]:
        """The tasks in training order; may be endless. Must give the same order for the same seed."""
        raise NotImplementedError

    def eval_tasks(self) -> Iterable[Task]:
        """The tasks to evaluate on; those of training unless you say otherwise."""
        return self.tasks()

    def tools(self, task: Task) -> Sequence[Toolset]:
        """Toolsets for a rollout. Of those with scope `group` or `worker` the first of each class is
        opened and shared."""
        return ()

    async def rollout(self, task: Task, chat: Chat) -> None:
        """Hold the conversation: the task, then whatever `user` says, until that is nothing."""
        await chat.act(task.prompt)
        while (words := await self.user(task, chat)) is not None:
            await chat.act(words)

    async def user(self, task: Task, chat: Chat) -> str | None:
        """A simulated user: what it says next, or None when it has no more to say."""
        return None


def check(env: object, origin: str) -> Environment:
    """Refuse what cannot be run, before anything is started for it."""
    if not isinstance(env, Environment):
        raise EnvironmentNotFound(f"{origin} gave a {type(env).__name__}, not an rw.Environment")
    kind = type(env)
    if kind.tasks is Environment.tasks:
        raise EnvironmentNotFound(f"{origin}: {kind.__name__} has no tasks() method")
    if not inspect.iscoroutinefunction(kind.user):
        raise EnvironmentNotFound(f"{origin}: {kind.__name__}.user must be 'async def'")
    if not any(not one.is_metric for one in scorers(kind)):
        raise EnvironmentNotFound(f"{origin}: {kind.__name__} has no method marked @rw.reward")
    for name in hooks(kind, "stop"):
        if inspect.iscoroutinefunction(getattr(kind, name)):
            raise EnvironmentNotFound(f"{origin}: stop condition {name} must be a plain 'def'")
    return env


def needs_whole_groups(env: Environment) -> bool:
    return env.needs_whole_groups or any(one.is_group for one in scorers(type(env)))
