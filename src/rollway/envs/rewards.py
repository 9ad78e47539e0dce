"""Rewards and metrics: methods of an environment that score a rollout."""

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar, overload

from msgspec import Struct

F = TypeVar("F", bound=Callable[..., Any])
_MARK = "__rollway_scorer__"


class Scorer(Struct, frozen=True):
    """A method that scores: a reward counts `weight` times, a metric is only reported."""

    name: str
    weight: float
    is_metric: bool
    is_async: bool
    is_group: bool = False
    """Scores all rollouts of a group at once."""
    wants_chat: bool = False


@overload
def reward(method: F) -> F: ...
@overload
def reward(*, weight: float = 1.0) -> Callable[[F], F]: ...
def reward(method: Any = None, *, weight: float = 1.0) -> Any:
    """Mark `method(self, task, rollout) -> float` as a reward.

    A plain function runs in a process of its own, with a deadline that kills; it sees its own copy of
    the environment. An `async def` runs on the worker's loop; one with a further argument `chat` gets a
    conversation with the policy, to ask it or children with the rollout's open tools for judgement.
    """
    return _mark(method, weight=float(weight), is_metric=False)


@overload
def group_reward(method: F) -> F: ...
@overload
def group_reward(*, weight: float = 1.0) -> Callable[[F], F]: ...
def group_reward(method: Any = None, *, weight: float = 1.0) -> Any:
    """Mark `method(self, task, rollouts) -> list[float]`: one reward for each rollout of a group.

    `rollouts` are those that did not fail. All rollouts of a group then run in one worker.
    """
    return _mark(method, weight=float(weight), is_metric=False, is_group=True)


@overload
def metric(method: F) -> F: ...
@overload
def metric() -> Callable[[F], F]: ...
def metric(method: Any = None) -> Any:
    """Mark `method(self, task, rollout) -> float` as reported, not rewarded."""
    return _mark(method, weight=0.0, is_metric=True)


def _mark(method: Any, *, weight: float, is_metric: bool, is_group: bool = False) -> Any:
    def decorate(method: F) -> F:
        is_async = inspect.iscoroutinefunction(method)
        wants_chat = "chat" in inspect.signature(method).parameters
        if wants_chat and not is_async:
            raise TypeError(f"{method.__name__} takes a chat, so it must be 'async def'")
        scorer = Scorer(method.__name__, weight, is_metric, is_async, is_group, wants_chat)
        setattr(method, _MARK, scorer)
        return method

    return decorate if method is None else decorate(method)


def _scorers(kind: type) -> tuple[Scorer, ...]:
    found: dict[str, Scorer] = {}
    for base in reversed(kind.__mro__):
        for name, member in vars(base).items():
            mark = getattr(member, _MARK, None)
            if isinstance(mark, Scorer):
                found[name] = mark
            elif name in found:
                del found[name]
    return tuple(found.values())


scorers: Callable[[type], tuple[Scorer, ...]] = cache(_scorers)
"""The marked methods of a class, in the order they are written, base classes first."""


def told_apart(kind: type, scores: dict[str, float]) -> tuple[dict[str, float], dict[str, float]]:
    """The rewards and the metrics among `scores`."""
    rewards = {one.name: scores[one.name] for one in scorers(kind) if not one.is_metric}
    return rewards, {name: value for name, value in scores.items() if name not in rewards}


def total(kind: type, scores: dict[str, float]) -> float:
    """The weighted sum of the rewards among `scores`."""
    return sum(one.weight * scores[one.name] for one in scorers(kind) if not one.is_metric)
