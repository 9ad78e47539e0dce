"""Groups that are still open: which rollouts they wait for, and how long they wait for the last ones."""

from collections import Counter
from collections.abc import Iterable

from msgspec import Struct, field

from ....records.group import Group, Member
from ....records.ids import GroupId, PolicyVersion, RolloutId
from ....records.rollout import Cancelled, Failed, Scored, Settled
from ....records.task import Task

STRAGGLERS_WAIT_S = 30.0
"""How long the rest of a group may run once `stragglers_after` of it has settled."""
NEVER = float("inf")

Running = tuple[str, RolloutId]
"""A rollout in flight, after its environment."""


class OpenGroup(Struct):
    id: GroupId
    env: str
    task: Task
    version: PolicyVersion
    waiting: set[RolloutId]
    settled: list[Settled] = field(default_factory=list)


class OpenGroups:
    """All rollouts in flight, by group. A group leaves when its last rollout settles."""

    def __init__(self) -> None:
        self._open: dict[GroupId, OpenGroup] = {}
        self._group_of: dict[RolloutId, GroupId] = {}
        self.in_flight: Counter[str] = Counter()
        """Rollouts in flight, by environment."""
        self.num_rollouts = 0
        """Rollouts of open groups, settled ones included."""

    @property
    def num_in_flight(self) -> int:
        return len(self._group_of)

    def open(self, group: OpenGroup) -> None:
        self._open[group.id] = group
        self._group_of.update(dict.fromkeys(group.waiting, group.id))
        self.in_flight[group.env] += len(group.waiting)
        self.num_rollouts += len(group.waiting)

    def group_of(self, rollout_id: RolloutId) -> OpenGroup | None:
        """Return the group that waits for this rollout, or None."""
        group_id = self._group_of.get(rollout_id)
        return None if group_id is None else self._open[group_id]

    def waiting_in(self, group_ids: Iterable[GroupId]) -> list[Running]:
        return _in_flight(self._open[group_id] for group_id in group_ids)

    def settle(self, settled: Settled, retry: RolloutId | None = None) -> Group | None:
        """Note the end of a rollout in flight, and return its group if that was the last one. With
        `retry` another rollout takes its place, and the group waits for that one."""
        group = self._open[self._group_of.pop(settled.rollout_id)]
        group.waiting.remove(settled.rollout_id)
        group.settled.append(settled)
        if retry is not None:
            group.waiting.add(retry)
            self._group_of[retry] = group.id
            self.num_rollouts += 1
            return None
        self.in_flight[group.env] -= 1
        if group.waiting:
            return None
        del self._open[group.id]
        self.num_rollouts -= len(group.settled)
        return _settled_group(group)

    def older_than(self, version: int) -> list[Running]:
        """Return the rollouts dispatched under a version before `version`."""
        groups = self._open.values()
        return _in_flight(group for group in groups if group.version < version)

    def all_in_flight(self) -> list[Running]:
        return _in_flight(self._open.values())


def _in_flight(groups: Iterable[OpenGroup]) -> list[Running]:
    return [(group.env, name) for group in groups for name in sorted(group.waiting)]


def _settled_group(group: OpenGroup) -> Group:
    settled = sorted(group.settled, key=lambda end: end.rollout_id)
    ends = [(end.rollout_id, end.outcome) for end in settled]
    return Group(
        id=group.id,
        env=group.env,
        task_id=group.task.id,
        members=tuple(Member(name, end) for name, end in ends if isinstance(end, Scored)),
        failed=tuple((name, end) for name, end in ends if isinstance(end, Failed)),
        cancelled=tuple((name, end) for name, end in ends if isinstance(end, Cancelled)),
    )


class Stragglers:
    """Finds groups that wait only for their last rollouts. Once the share `after` of a group has
    settled, the rest has `STRAGGLERS_WAIT_S` left. Without `after` they wait without limit."""

    def __init__(self, after: float | None) -> None:
        self._after = after
        self._due_s: dict[GroupId, float] = {}

    def settled(self, group: OpenGroup, now_s: float) -> None:
        num_settled, num_waiting = len(group.settled), len(group.waiting)
        if not num_waiting:
            self._due_s.pop(group.id, None)
        elif self._after and num_settled >= self._after * (num_settled + num_waiting):
            self._due_s.setdefault(group.id, now_s + STRAGGLERS_WAIT_S)

    def take_due(self, now_s: float) -> list[GroupId]:
        """Return the groups whose stragglers have had their time. Each is returned once."""
        due = [group_id for group_id, due_s in self._due_s.items() if due_s <= now_s]
        self._due_s.update(dict.fromkeys(due, NEVER))
        return due
