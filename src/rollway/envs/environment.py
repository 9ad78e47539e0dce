"""The base class of environments."""

import inspect
from collections.abc import Iterable, Iterator, Sequence

from ..errors import EnvironmentInvalid
from ..records.task import Task
from .chat import Chat
from .marks import hooks
from .rewards import scorers
from .tools import Toolset


class Environment:
    """An environment gives tasks, holds the conversation of a rollout, and scores it.

    Write `tasks` and at least one `@rw.reward`. Write `rollout` too, unless the one below is enough.
    """

    system_prompt: str = ""
    max_turns: int | None = None
    """The rollout ends after this many turns, those of children included. None means no limit."""
    max_rollout_tokens: int | None = None
    """The rollout ends after the turn in which it has sampled this many tokens, also in children."""
    seed: int = 0
    """The run's seed. It is set before `tasks` is called."""
    needs_whole_groups: bool = False
    """Run all rollouts of a group in one worker. Set this if a toolset has scope `group`. A method with
    @rw.group_reward has the same effect."""

    def tasks(self) -> Iterable[Task]:
        """Return the tasks in training order, the same for the same seed. They may be endless."""
        raise NotImplementedError

    def eval_tasks(self) -> Iterable[Task]:
        """Return the tasks to evaluate on; by default those of training."""
        return self.tasks()

    def tools(self, task: Task) -> Sequence[Toolset]:
        """Return the toolsets for a rollout of this task. Toolsets of scope `group` or `worker` are
        opened once for each class: the first rollout opens its own, and later ones share that."""
        return ()

    async def rollout(self, task: Task, chat: Chat) -> None:
        """Hold the conversation: say the task's prompt, then what `user` says, until it says nothing."""
        await chat.act(task.prompt)
        while (words := await self.user(task, chat)) is not None:
            await chat.act(words)

    async def user(self, task: Task, chat: Chat) -> str | None:
        """Return what a simulated user says next, or None to end the conversation."""
        return None


def check(env: object, origin: str) -> Environment:
    """Refuse an environment that cannot run, before anything is started for it."""
    if not isinstance(env, Environment):
        raise EnvironmentInvalid(f"{origin} is a {type(env).__name__}, not an rw.Environment")
    for fault in _faults(env):
        raise EnvironmentInvalid(f"{origin}: {type(env).__name__}{fault}")
    return env


def _faults(env: Environment) -> Iterator[str]:
    kind = type(env)
    if kind.tasks is Environment.tasks:
        yield " has no method tasks(); write one that returns rw.Task objects"
    for method in ("tasks", "eval_tasks"):
        function = getattr(kind, method)
        if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
            yield f".{method} must be written without 'async': rollway runs it in a process of its own"
    for scorer in scorers(kind):
        function = getattr(kind, scorer.name)
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            yield f".{scorer.name} yields; a reward returns one number"
    if not inspect.iscoroutinefunction(kind.user):
        yield ".user must be 'async def'"
    if all(scorer.is_metric for scorer in scorers(kind)):
        yield " has no reward; mark at least one method with @rw.reward"
    for stop in hooks(kind, "stop"):
        if inspect.iscoroutinefunction(getattr(kind, stop)):
            yield f".{stop} is a stop condition and must be a plain 'def'"
    for limit in ("max_turns", "max_rollout_tokens"):
        value = getattr(env, limit)
        if value is not None and (not isinstance(value, int) or value < 1):
            yield f".{limit} is {value!r}; use a number from 1 on, or None for no limit"
    if not isinstance(env.system_prompt, str):
        yield f".system_prompt is a {type(env.system_prompt).__name__}, not a text"
    yield from _wrong_signatures(env)


def _wrong_signatures(env: Environment) -> Iterator[str]:
    """Yield the methods that would raise a TypeError each time rollway calls them."""
    kind = type(env)
    called = {"rollout": ("task", "chat"), "user": ("task", "chat"), "tools": ("task",)}
    for hook in (*hooks(kind, "stop"), *hooks(kind, "update")):
        called[hook] = "task", "chat"
    for scorer in scorers(kind):
        called[scorer.name] = "task", "rollouts" if scorer.is_group else "rollout"
    wants_chat = {scorer.name for scorer in scorers(kind) if scorer.wants_chat}
    for name, arguments in called.items():
        extra = {"chat": None} if name in wants_chat else {}
        try:
            inspect.signature(getattr(env, name)).bind(*arguments, **extra)
        except TypeError as error:
            wanted = ", ".join(("self", *arguments, *extra))
            yield f".{name} must take ({wanted}), because rollway calls it so: {error}"


def needs_whole_groups(env: Environment) -> bool:
    has_group_reward = any(scorer.is_group for scorer in scorers(type(env)))
    return env.needs_whole_groups or has_group_reward
