"""Rollouts that keep their group from closing."""

from ...records.ids import GroupId
from .limits import NEVER


class Stragglers:
    """Once the share `after` of a group has settled, the rest has `wait_s` left."""

    def __init__(self, after: float, wait_s: float) -> None:
        self._after = after
        self._wait_s = wait_s
        self._due_s: dict[GroupId, float] = {}

    def settled(self, id: GroupId, num_settled: int, num_waiting: int, now_s: float) -> None:
        """How far a group is."""
        if not num_waiting:
            self._due_s.pop(id, None)
        elif self._after < 1 and num_settled >= self._after * (num_settled + num_waiting):
            self._due_s.setdefault(id, now_s + self._wait_s)

    def take_due(self, now_s: float) -> list[GroupId]:
        """Groups whose stragglers have had their time; each is named once."""
        due = [id for id, at_s in self._due_s.items() if at_s <= now_s]
        self._due_s.update(dict.fromkeys(due, NEVER))
        return due
