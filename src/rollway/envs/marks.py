"""Marks on methods: a decorator puts a note on a method, and the notes of a class can be listed.

Stop conditions and updates are marked here, rewards in rewards.py, tools in tools.py.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any, Generic, Literal, TypeVar

Method = TypeVar("Method", bound=Callable[..., Any])
Note = TypeVar("Note")
Moment = Literal["stop", "update"]


class MethodMarks(Generic[Note]):
    """One kind of mark: puts notes on methods and collects those of a class."""

    def __init__(self, kind: str) -> None:
        self._attribute = f"__rollway_{kind}__"
        self._by_class: dict[type, Mapping[str, Note]] = {}

    def add(self, method: Method, note: Note) -> Method:
        setattr(method, self._attribute, note)
        return method

    def of(self, owner: type) -> Mapping[str, Note]:
        """Return the notes by method name, base classes first. An override without a mark has none."""
        if owner not in self._by_class:
            members: dict[str, Any] = {}
            for base in reversed(owner.__mro__):
                members |= vars(base)
            notes = {name: getattr(members[name], self._attribute, None) for name in members}
            self._by_class[owner] = {name: note for name, note in notes.items() if note}
        return self._by_class[owner]


_STOPS: MethodMarks[bool] = MethodMarks("stop")
_UPDATES: MethodMarks[bool] = MethodMarks("update")


def stop(method: Method) -> Method:
    """Mark `method(self, task, chat) -> bool` as a stop condition.

    It is called before every turn of the rollout's own chat but the first, and not in children. When
    it returns true, the rollout ends there, and its `stop` is the method's name. It runs on the event
    loop, so it must be quick.
    """
    return _STOPS.add(method, True)


def update(method: Method) -> Method:
    """Mark `method(self, task, chat)` to run after the rollout and before its rewards.

    It may note things in `chat.info` and ask children, whose rows join the rollout.
    """
    return _UPDATES.add(method, True)


def hooks(owner: type, moment: Moment) -> Collection[str]:
    """Return the names of a class's stop conditions or updates, in the order they are written."""
    return (_STOPS if moment == "stop" else _UPDATES).of(owner)
