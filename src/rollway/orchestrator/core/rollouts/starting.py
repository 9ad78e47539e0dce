"""What runs: which rollouts start, which run again, which are cut, and how many at a time."""

from msgspec import Struct

from ....records.group import Group
from ....records.ids import GroupId, PolicyVersion, RolloutId, rollout_id
from ....records.restored import RestoredGroup
from ....records.rollout import Cancelled, Settled
from ....records.task import Split, Task
from ..commands import CancelRollout, Command, Dispatch, PullTasks, ReportEval
from ..events import TasksArrived
from ..limits import Limits
from .admission import Concurrency, PayloadBudget, StartRate
from .evals import Evaluations
from .groups import OpenGroups, Stragglers
from .patience import Patience
from .retries import Retries
from .tasks import TaskMix


class Demand(Struct, frozen=True):
    """How much is already on its way to the trainer, in rollouts."""

    settled: float
    """In groups that have closed and are not shipped."""
    training: int
    """In batches whose weights the engine does not sample from yet."""
    a_batch: int
    steps_left: int


class Starting:
    """Rollouts from their task to their end. Every bound on what runs is here."""

    def __init__(self, limits: Limits, ratios: dict[str, float], cursors: dict[str, int]) -> None:
        self._limits = limits
        ahead = 2 * max(1, limits.max_outstanding // limits.group_size)
        self.tasks = TaskMix(ratios, cursors, ahead, limits.difficulty)
        self.groups = OpenGroups()
        self.evals = Evaluations(limits.evals, limits.max_steps)
        self.governor = PayloadBudget(limits.payload_bytes)
        self.patience = Patience(limits.patience_s, limits.quiet_s)
        self.concurrency = Concurrency(limits.max_in_flight, limits.group_size, adapts=limits.adapts)
        self.rate = StartRate(limits.rollouts_a_minute)
        self.retries = Retries(limits.retries)
        self.whole_groups: frozenset[str] = frozenset()
        self.next_group = GroupId(0)
        self.version = PolicyVersion(0)
        """Under which rollouts start."""
        self.is_held_back = False
        """Whether the payload budget alone keeps the next group from starting."""
        self._stragglers = Stragglers(limits.cut_after, limits.cut_wait_s)
        self._most = _most_in_flight(limits, ratios)

    @property
    def num_in_flight(self) -> int:
        return self.groups.num_in_flight + self.evals.num_in_flight

    @property
    def silent_envs(self) -> tuple[str, ...]:
        """Environments that others do not wait for."""
        return tuple(
            env for env in self._most
            if (self.groups.in_flight_of(env) or self.tasks.is_waiting_for(env))
            and self.patience.is_lost_with(env)
        )  # fmt: skip

    @property
    def _full_envs(self) -> tuple[str, ...]:
        """Environments with no room for a group: one that never answers must not take all there is."""
        size = self._limits.group_size
        return tuple(
            env for env, most in self._most.items() if self.groups.in_flight_of(env) + size > most
        )

    def tick(self, now_s: float) -> list[Command]:
        """Time passes: cut what is waited for in vain."""
        self.patience.tick(now_s)
        self.rate.tick(now_s)
        cut: list[Command] = [
            CancelRollout(self.groups.env_of(group), id, "cut: the rest of its group has settled")
            for group in self._stragglers.take_due(now_s) for id in self.groups.waiting_in(group)
        ]  # fmt: skip
        reason = f"no rollout of the environment settled for {self._limits.patience_s:g} s"
        for env in self.silent_envs:
            cut += [CancelRollout(env, id, reason) for id in self.evals.abandon(env)]
        return cut

    def settle(self, event: Settled, *, may_retry: bool) -> Group | Dispatch | None:
        """Take the end of a rollout that a group waits for: the group if it was the last, or the
        rollout that runs in its place."""
        group = self.groups.group_of(event.rollout_id)
        assert group is not None
        may_retry = may_retry and group.env not in self.whole_groups
        again = self.retries.next_id(event.rollout_id, event.outcome) if may_retry else None
        whole = self.groups.settle(event, instead=again)
        self._heard(group.env, event)
        self._stragglers.settled(group.id, len(group.settled), len(group.waiting), self.patience.now_s)
        if again is not None:
            return self._order(group.env, group.id, again, group.task)
        return whole

    def _heard(self, env: str, event: Settled) -> None:
        owes = self.groups.in_flight_of(env) > 0 or self.tasks.is_waiting_for(env)
        if not isinstance(event.outcome, Cancelled):
            self.patience.heard(env, owes=owes)
        elif not owes:
            self.patience.let_off(env)

    def arrived(self, event: TasksArrived) -> list[PullTasks | ReportEval]:
        """Tasks to train or to evaluate on."""
        env, start, tasks, exhausted = event.env, event.start, event.tasks, event.exhausted
        self.patience.heard(env, owes=self.groups.in_flight_of(env) > 0)
        if event.split == "eval":
            return self.evals.arrived(env, start, tasks, exhausted)
        self.tasks.arrived(env, start, tasks, exhausted)
        return []

    def reopen(self, group: RestoredGroup) -> list[Dispatch]:
        """A group that a restart found; those of its rollouts that have to run again."""
        self._open(group.id, group.env, group.task, list(group.ids))
        ended = {settled.rollout_id for settled in group.settled}
        missing = [id for id in group.ids if id not in ended]
        return [self._order(group.env, group.id, id, group.task) for id in missing]

    def start(self, demand: Demand) -> list[Command]:
        """Start what every bound leaves room for, evaluations first: they have a share of their own."""
        commands = self._evaluate()
        while self._has_room(demand):
            taken = self.tasks.take(self.silent_envs, self._full_envs)
            if taken is None:
                break
            env, task = taken
            group_id, ids = self._new_group(self._limits.group_size)
            self._open(group_id, env, task, ids)
            self.rate.started(len(ids))
            self.retries.started(len(ids))
            commands += [self._order(env, group_id, id, task) for id in ids]
        return commands + (self._pull() if demand.steps_left else [])

    def _evaluate(self) -> list[Command]:
        commands: list[Command] = []
        most = self.concurrency.limit
        while self.num_in_flight + self.evals.group_size <= most:
            taken = self.evals.take(most)
            if taken is None:
                break
            group_id, ids = self._new_group(self.evals.group_size)
            self.evals.open(group_id, *taken, ids)
            commands += [self._order(taken[0], group_id, id, taken[1], "eval") for id in ids]
        return commands

    def _pull(self) -> list[Command]:
        pulls = self.tasks.pull()
        for pull in pulls:
            self.patience.asked(pull.env)
        return [*pulls]

    def _new_group(self, size: int) -> tuple[GroupId, list[RolloutId]]:
        id = self.next_group
        self.next_group = GroupId(id + 1)
        return id, [rollout_id(id, member) for member in range(size)]

    def _open(self, id: GroupId, env: str, task: Task, ids: list[RolloutId]) -> None:
        self.patience.asked(env)
        self.groups.open(id, env, task, self.version, ids)

    def _order(
        self, env: str, group_id: GroupId, id: RolloutId, task: Task, split: Split = "train"
    ) -> Dispatch:
        return Dispatch(env, group_id, id, task, self.version, self.tasks.position(env), split)

    def _has_room(self, demand: Demand) -> bool:
        limits, size = self._limits, self._limits.group_size
        lost = sum(self.groups.in_flight_of(env) for env in self.silent_envs)
        unshipped = self.groups.num_rollouts - lost + demand.settled
        most = limits.max_outstanding * demand.a_batch / limits.batch_size
        wanted = (
            self.num_in_flight + size <= self.concurrency.limit
            and unshipped + demand.training < most
            and unshipped < demand.steps_left * demand.a_batch
            and self.rate.allows
        )
        fits = self.governor.has_room(self.num_in_flight + size)
        self.is_held_back = wanted and not fits
        return wanted and fits


def _most_in_flight(limits: Limits, ratios: dict[str, float]) -> dict[str, int]:
    """What may run of each environment: a slow one needs more than its share, but leaves the others a
    quarter of theirs."""
    size, whole = limits.group_size, sum(ratios.values())
    quarters = {env: limits.max_in_flight * ratio / whole / 4 for env, ratio in ratios.items()}
    reserved = {env: max(size, int(quarter) // size * size) for env, quarter in quarters.items()}
    taken = sum(reserved.values())
    return {env: max(size, limits.max_in_flight - taken + reserved[env]) for env in ratios}
