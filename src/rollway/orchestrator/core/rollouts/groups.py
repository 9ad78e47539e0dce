"""Groups that are still open: which rollouts they wait for."""

from collections import Counter

from msgspec import Struct, field

from ....records.group import Group, Member
from ....records.ids import GroupId, PolicyVersion, RolloutId
from ....records.rollout import Cancelled, Failed, Scored, Settled
from ....records.task import Task
from ..limits import NEVER


class OpenGroup(Struct):
    """Its rollouts by whether they have settled."""

    id: GroupId
    env: str
    task: Task
    version: PolicyVersion
    waiting: set[RolloutId]
    settled: list[Settled] = field(default_factory=list)


class OpenGroups:
    """Rollouts in flight, by group. A group leaves when its last rollout settles."""

    def __init__(self) -> None:
        self._open: dict[GroupId, OpenGroup] = {}
        self._group_of: dict[RolloutId, GroupId] = {}
        self._by_env: Counter[str] = Counter()
        self.num_rollouts = 0
        """Of open groups, settled ones too."""

    @property
    def num_in_flight(self) -> int:
        return len(self._group_of)

    def open(
        self, id: GroupId, env: str, task: Task, version: PolicyVersion, ids: list[RolloutId]
    ) -> None:
        self._open[id] = OpenGroup(id, env, task, version, set(ids))
        self._group_of.update(dict.fromkeys(ids, id))
        self._by_env[env] += len(ids)
        self.num_rollouts += len(ids)

    def in_flight_of(self, env: str) -> int:
        return self._by_env[env]

    def group_of(self, id: RolloutId) -> OpenGroup | None:
        """None if no group waits for this rollout."""
        group_id = self._group_of.get(id)
        return None if group_id is None else self._open[group_id]

    def waiting_in(self, id: GroupId) -> list[RolloutId]:
        return sorted(self._open[id].waiting)

    def env_of(self, id: GroupId) -> str:
        return self._open[id].env

    def settle(self, settled: Settled, instead: RolloutId | None = None) -> Group | None:
        """Take the end of a rollout in flight; the group if it was the last one it waited for. With
        `instead` another rollout takes its place, and the group waits for that."""
        group = self._open[self._group_of.pop(settled.rollout_id)]
        group.waiting.remove(settled.rollout_id)
        group.settled.append(settled)
        if instead is not None:
            group.waiting.add(instead)
            self._group_of[instead] = group.id
            self.num_rollouts += 1
            return None
        self._by_env[group.env] -= 1
        if group.waiting:
            return None
        del self._open[group.id]
        self.num_rollouts -= len(group.settled)
        return _closed(group)

    def older_than(self, version: int) -> list[tuple[str, RolloutId]]:
        """Environment and id of what was dispatched under a version before `version`."""
        return [
            (one.env, id)
            for one in self._open.values() if one.version < version
            for id in sorted(one.waiting)
        ]  # fmt: skip

    def all_in_flight(self) -> list[tuple[str, RolloutId]]:
        return [(one.env, id) for one in self._open.values() for id in sorted(one.waiting)]


def _closed(group: OpenGroup) -> Group:
    ends = sorted(group.settled, key=lambda one: one.rollout_id)
    return Group(
        id=group.id,
        env=group.env,
        task_id=group.task.id,
        members=tuple(
            Member(one.rollout_id, one.outcome) for one in ends if isinstance(one.outcome, Scored)
        ),
        failed=tuple((one.rollout_id, one.outcome) for one in ends if isinstance(one.outcome, Failed)),
        cancelled=tuple(
            (one.rollout_id, one.outcome) for one in ends if isinstance(one.outcome, Cancelled)
        ),
    )


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
