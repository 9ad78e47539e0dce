"""Evaluations between training: when one is due, what it still has to run, and when it is over."""

from collections import deque

from ....records.group import ClosedGroup
from ....records.ids import GroupId, PolicyVersion, RolloutId
from ....records.rollout import Settled
from ....records.task import Task
from ..commands import PullTasks, RecordEvalGroup, ReportEval
from ..limits import EvalRule
from .groups import OpenGroups

PAGE = 64
"""Tasks asked for at a time."""


class Evaluations:
    """One evaluation at a time. If the next is due before this one is over, it follows; if two are, the
    newer of them does. Weights may change meanwhile: the report says which versions were seen."""

    def __init__(self, rule: EvalRule | None, max_steps: int) -> None:
        self._rule = rule
        self._max_steps = max_steps
        self._last: int | None = None
        self._next: PolicyVersion | None = None
        self._version: PolicyVersion | None = None
        self._pulling: set[str] = set()
        self._pending: deque[tuple[str, Task]] = deque()
        self._open = OpenGroups()
        self._closed: list[ClosedGroup] = []

    @property
    def num_in_flight(self) -> int:
        return self._open.num_in_flight

    @property
    def is_running(self) -> bool:
        return self._version is not None

    @property
    def group_size(self) -> int:
        return self._rule.num_rollouts if self._rule else 0

    @property
    def waits_for(self) -> str:
        """In words; empty if no evaluation runs."""
        if self._version is None:
            return ""
        running, left = self.num_in_flight, len(self._pending)
        return f"the evaluation of version {self._version}: {running} rollouts run, {left} tasks wait"

    def done_before(self, version: int | None) -> None:
        """What a run had evaluated before it was interrupted."""
        self._last = version

    def is_due(self, version: int) -> bool:
        """After every so many versions, counted from 0, and after the last one."""
        rule = self._rule
        if rule is None or (self._last is not None and version <= self._last):
            return False
        if self._last is None:
            return rule.at_start or version >= rule.every or version == self._max_steps
        return version // rule.every > self._last // rule.every or version == self._max_steps

    def applied(self, version: PolicyVersion) -> list[PullTasks]:
        """The engine samples from this version now."""
        if not self.is_due(version):
            return []
        self._last = version
        self._next = version
        return self._begin()

    def _begin(self) -> list[PullTasks]:
        if self._rule is None or self._next is None or self.is_running:
            return []
        self._version, self._next = self._next, None
        self._pulling = set(self._rule.envs)
        count = min(PAGE, self._rule.num_tasks)
        return [PullTasks(env, 0, count, "eval") for env in self._rule.envs]

    def arrived(
        self, env: str, start: int, tasks: tuple[Task, ...], exhausted: bool
    ) -> list[PullTasks | ReportEval]:
        if self._rule is None or env not in self._pulling:
            return []
        self._pending.extend((env, task) for task in tasks)
        end = start + len(tasks)
        if exhausted or not tasks or end >= self._rule.num_tasks:
            self._pulling.discard(env)
            return self._finish()
        return [PullTasks(env, end, min(PAGE, self._rule.num_tasks - end), "eval")]

    def take(self, max_in_flight: int) -> tuple[str, Task] | None:
        """The next task, if its rollouts fit into the share of what may run; one task always may."""
        if self._rule is None or not self._pending:
            return None
        running = self._open.num_in_flight
        most = max(self._rule.num_rollouts, int(self._rule.share * max_in_flight))
        return self._pending.popleft() if running + self._rule.num_rollouts <= most else None

    def open(self, id: GroupId, env: str, task: Task, ids: list[RolloutId]) -> None:
        assert self._version is not None
        self._open.open(id, env, task, self._version, ids)

    def waits_for_rollout(self, id: RolloutId) -> bool:
        return self._open.group_of(id) is not None

    def settle(self, settled: Settled) -> list[RecordEvalGroup | ReportEval | PullTasks]:
        group = self._open.settle(settled)
        if group is None or self._version is None:
            return []
        closed = ClosedGroup(group, (0.0,) * len(group.members), "eval")
        self._closed.append(closed)
        return [RecordEvalGroup(self._version, closed), *self._finish()]

    def _finish(self) -> list[PullTasks | ReportEval]:
        """Report once everything has settled, and go on with what is due."""
        if self._version is None or self._pulling or self._pending or self._open.num_in_flight:
            return []
        report = ReportEval(self._version, tuple(self._closed))
        self._version, self._closed = None, []
        return [report, *self._begin()]

    def abandon(self, env: str) -> list[RolloutId]:
        """An environment gives no answers: what is to be cancelled of it, and the rest forgotten."""
        self._pending = deque(one for one in self._pending if one[0] != env)
        return [id for name, id in self._open.all_in_flight() if name == env]
