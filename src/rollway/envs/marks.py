"""Methods of an environment that are called at a certain moment: stop conditions and updates."""

from collections.abc import Callable
from functools import cache
from typing import Any, Literal, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
_MARK = "__rollway_hook__"
Moment = Literal["stop", "update"]


def stop(method: F) -> F:
    """Mark `method(self, task, chat) -> bool` as a stop condition, asked before all turns but the first.

    When it says yes, the rollout ends there and its stop is the method's name. It runs on the loop, so
    it must be quick.
    """
    setattr(method, _MARK, "stop")
    return method


def update(method: F) -> F:
    """Mark `method(self, task, chat)` to run after the rollout and before its rewards.

    It may note things in `chat.info`, and ask children whose rows join the rollout.
    """
    setattr(method, _MARK, "update")
    return method


def _hooks(kind: type, moment: Moment) -> tuple[str, ...]:
    names = dict.fromkeys(name for base in reversed(kind.__mro__) for name in vars(base))
    return tuple(name for name in names if getattr(getattr(kind, name), _MARK, None) == moment)


hooks: Callable[[type, Moment], tuple[str, ...]] = cache(_hooks)
"""Names of a class's methods for a moment, in the order they are written, base classes first."""
