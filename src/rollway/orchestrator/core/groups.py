"""Groups that are still open: which rollouts they wait for."""

from collections import Counter

from msgspec import Struct, field

from ...records.group import Group, Member
from ...records.ids import GroupId, PolicyVersion, RolloutId
from ...records.rollout import Cancelled, Failed, Scored, Settled
from ...records.task import Task


class _Open(Struct):
    id: GroupId
    env: str
    task: Task
    version: PolicyVersion
    waiting: set[RolloutId]
    settled: list[Settled] = field(default_factory=list)


class OpenGroups:
    """Rollouts in flight, by group. A group leaves when its last rollout settles."""

    def __init__(self) -> None:
        self._open: dict[GroupId, _Open] = {}
        self._group_of: dict[RolloutId, GroupId] = {}
        self._by_env: Counter[str] = Counter()

    @property
    def num_in_flight(self) -> int:
        return len(self._group_of)

    @property
    def num_rollouts(self) -> int:
        """Rollouts of open groups, settled ones too."""
        return sum(len(one.waiting) + len(one.settled) for one in self._open.values())

    def open(
        self, id: GroupId, env: str, task: Task, version: PolicyVersion, ids: list[RolloutId]
    ) -> None:
        self._open[id] = _Open(id, env, task, version, set(ids))
        self._group_of.update(dict.fromkeys(ids, id))
        self._by_env[env] += len(ids)

    def in_flight_of(self, env: str) -> int:
        return self._by_env[env]

    def env_of(self, id: RolloutId) -> str:
        return self._open[self._group_of[id]].env

    def waits_for(self, id: RolloutId) -> bool:
        return id in self._group_of

    def settle(self, settled: Settled) -> Group | None:
        """Take the end of a rollout in flight; the group if it was the last one it waited for."""
        id = self._group_of.pop(settled.rollout_id)
        group = self._open[id]
        self._by_env[group.env] -= 1
        group.waiting.remove(settled.rollout_id)
        group.settled.append(settled)
        if group.waiting:
            return None
        del self._open[id]
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


def _closed(group: _Open) -> Group:
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
