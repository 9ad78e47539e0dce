"""Rewards and metrics: methods of an environment that score a rollout."""

import inspect
from collections.abc import Callable, Collection
from typing import Any, overload

from msgspec import Struct

from .marks import Method, MethodMarks


class Scorer(Struct, frozen=True):
    """A method that scores rollouts. A reward counts `weight` times; a metric is only reported."""

    name: str
    weight: float
    is_metric: bool
    is_async: bool
    is_group: bool = False
    """It scores all rollouts of a group at once."""
    wants_chat: bool = False


_SCORERS: MethodMarks[Scorer] = MethodMarks("scorer")


def _number(weight: float) -> float:
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        raise TypeError(f"the weight of a reward is a number, not {weight!r}")
    return float(weight)


@overload
def reward(method: Method) -> Method: ...
@overload
def reward(*, weight: float = 1.0) -> Callable[[Method], Method]: ...
def reward(method: Any = None, *, weight: float = 1.0) -> Any:
    """Mark `method(self, task, rollout) -> float` as a reward.

    A plain `def` runs in another process, on that process's copy of the environment, and is killed at
    its deadline. An `async def` runs on the worker's event loop. If it has an argument `chat`, it can
    ask the policy to judge, or start children with the rollout's open tools. These turns do not train.
    """
    return _mark(method, weight=_number(weight), is_metric=False)


@overload
def group_reward(method: Method) -> Method: ...
@overload
def group_reward(*, weight: float = 1.0) -> Callable[[Method], Method]: ...
def group_reward(method: Any = None, *, weight: float = 1.0) -> Any:
    """Mark `method(self, task, rollouts) -> list[float]`, which returns one reward for each rollout.

    `rollouts` are those of a group that did not fail. All rollouts of the group run in one worker.
    """
    return _mark(method, weight=_number(weight), is_metric=False, is_group=True)


@overload
def metric(method: Method) -> Method: ...
@overload
def metric() -> Callable[[Method], Method]: ...
def metric(method: Any = None) -> Any:
    """Mark `method(self, task, rollout) -> float` as a metric: reported, and not part of the reward."""
    return _mark(method, weight=0.0, is_metric=True)


def _mark(method: Any, *, weight: float, is_metric: bool, is_group: bool = False) -> Any:
    def decorate(method: Method) -> Method:
        name = method.__name__
        is_async = inspect.iscoroutinefunction(method)
        wants_chat = "chat" in inspect.signature(method).parameters
        if wants_chat and not is_async:
            raise TypeError(f"{name} has an argument 'chat', so it must be 'async def'")
        scorer = Scorer(name, weight, is_metric, is_async, is_group, wants_chat)
        return _SCORERS.add(method, scorer)

    return decorate if method is None else decorate(method)


def scorers(env_class: type) -> Collection[Scorer]:
    """Return the rewards and metrics of a class, base classes first, in the order they are written."""
    return _SCORERS.of(env_class).values()


def split_scores(
    env_class: type, scores: dict[str, float]
) -> tuple[dict[str, float], dict[str, float]]:
    """Split scores into rewards and metrics."""
    rewards = {reward.name: scores[reward.name] for reward in _rewards(env_class)}
    return rewards, {name: scores[name] for name in scores if name not in rewards}


def total(env_class: type, scores: dict[str, float]) -> float:
    """Return the weighted sum of the rewards among `scores`."""
    return sum(reward.weight * scores[reward.name] for reward in _rewards(env_class))


def _rewards(env_class: type) -> list[Scorer]:
    return [scorer for scorer in scorers(env_class) if not scorer.is_metric]
