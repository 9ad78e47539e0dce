"""Evaluations between the steps: when one is due, what it still has to run, and when it is over."""

from collections import deque

from ....config.specs import CoreSpec
from ....records.group import ClosedGroup
from ....records.ids import PolicyVersion
from ....records.rollout import Settled
from ....records.task import Task
from ..commands import Commands, PullTasks, RecordEvalGroup, ReportEval
from ..events import TasksArrived
from .groups import OpenGroups, Running

PAGE = 64
"""Tasks asked for at a time."""
SHARE = 0.25
"""At most this part of what may run is evaluation, so that training goes on meanwhile. With
`max_off_policy_steps = 0` training waits, and all of it may be."""


class Evaluations:
    """Runs one evaluation at a time.

    An evaluation that becomes due while another runs starts after it; if two become due, only the newer
    one runs. The weights may change during an evaluation, and its report says which versions it saw.
    """

    def __init__(self, spec: CoreSpec) -> None:
        self._config = spec.eval
        self._envs = (spec.eval and spec.eval.envs) or tuple(spec.ratios)
        self._max_steps = spec.max_steps
        self._share = SHARE if spec.orchestrator.max_off_policy_steps else 1.0
        self.last: int | None = None
        """The last version that was evaluated, or is being evaluated, also before a restart."""
        self._next: PolicyVersion | None = None
        self._version: PolicyVersion | None = None
        self._pulling: dict[str, int] = {}
        """Environments that owe tasks, and the position of the first one they owe."""
        self._pending: deque[tuple[str, Task]] = deque()
        self.groups = OpenGroups()
        self._closed: list[ClosedGroup] = []

    @property
    def num_in_flight(self) -> int:
        return self.groups.num_in_flight

    @property
    def is_running(self) -> bool:
        return self._version is not None

    @property
    def group_size(self) -> int:
        return self._config.num_rollouts if self._config else 0

    @property
    def waits_for(self) -> str:
        """What the running evaluation waits for, in words; empty if none runs."""
        if self._version is None:
            return ""
        return (
            f"the evaluation of version {self._version}: {self.num_in_flight} rollouts run, "
            f"{len(self._pending)} tasks wait"
        )

    def is_due(self, version: int) -> bool:
        """Return whether this version is to be evaluated: the first, one in every few, and the last."""
        config = self._config
        if config is None:
            return False
        if self.last is None:
            return True
        is_regular = version // config.every > self.last // config.every
        return version > self.last and (is_regular or version == self._max_steps)

    def applied(self, version: PolicyVersion) -> Commands:
        if not self.is_due(version):
            return []
        self.last = self._next = version
        return self._begin()

    def _begin(self) -> Commands:
        if self._config is None or self._next is None or self.is_running:
            return []
        self._version, self._next = self._next, None
        self._pulling = dict.fromkeys(self._envs, 0)
        count = min(PAGE, self._config.num_tasks)
        return [PullTasks(env, 0, count, "eval") for env in self._envs]

    def arrived(self, event: TasksArrived) -> Commands:
        env, tasks = event.env, event.tasks
        if self._config is None or self._pulling.get(env) != event.start:
            return []  # of an evaluation that did not wait for it
        self._pending.extend((env, task) for task in tasks)
        end = event.start + len(tasks)
        num_left = self._config.num_tasks - end
        if event.exhausted or not tasks or num_left <= 0:
            del self._pulling[env]
            return self.report_if_settled()
        self._pulling[env] = end
        return [PullTasks(env, end, min(PAGE, num_left), "eval")]

    def take(self, max_in_flight: int) -> tuple[str, Task] | None:
        """Take the next task if its rollouts fit into the share of evaluations. One task always fits."""
        if self._config is None or not self._pending:
            return None
        size = self._config.num_rollouts
        most = max(size, int(self._share * max_in_flight))
        return self._pending.popleft() if self.num_in_flight + size <= most else None

    def settle(self, settled: Settled) -> Commands:
        group = self.groups.settle(settled)
        if group is None or self._version is None:
            return []
        closed = ClosedGroup(group, (0.0,) * len(group.members), "eval")
        self._closed.append(closed)
        return [RecordEvalGroup(self._version, closed), *self.report_if_settled()]

    def report_if_settled(self) -> Commands:
        """Report once everything has settled, and begin the next evaluation if one is due."""
        if self._version is None or self._pulling or self._pending or self.num_in_flight:
            return []
        report = ReportEval(self._version, tuple(self._closed))
        self._version, self._closed = None, []
        return [report, *self._begin()]

    def abandon(self, env: str) -> list[Running]:
        """Drop the tasks of an environment, also those it owes, and return its rollouts, to cancel. If
        it has none, no end of a rollout will finish the evaluation: call `report_if_settled`."""
        self._pulling.pop(env, None)
        self._pending = deque(pending for pending in self._pending if pending[0] != env)
        return [running for running in self.groups.all_in_flight() if running[0] == env]
