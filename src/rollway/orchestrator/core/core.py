"""The orchestrator's decisions: what runs, when a group counts, what ships, what is stale."""

from ...records.engine import EngineLoad
from ...records.group import ClosedGroup, Group
from ...records.ids import PolicyVersion, Step
from ...records.payload import PayloadRef
from ...records.restored import Restored, RestoredGroup
from ...records.rollout import Scored, Settled
from ...records.task import Pool, Task
from .batches.closer import MIN_SCORED, GroupCloser
from .batches.shipping import Shipping, WeightVersions
from .commands import (
    CancelRollout,
    Command,
    DiscardGroup,
    Dispatch,
    Finish,
    GiveUp,
    RecordEvalGroup,
    ReleasePayload,
)
from .events import (
    Credited,
    Event,
    Started,
    TasksArrived,
    Tick,
    VersionPublished,
    WeightsApplied,
    WorkerLag,
)
from .limits import Limits
from .rollouts.patience import UselessStreak
from .rollouts.starting import Demand, Starting


class Core:
    """The state of a run. Every dispatched rollout is in flight, in a group, in a batch, or gone."""

    def __init__(
        self, limits: Limits, ratios: dict[str, float], first_step: Step, cursors: dict[str, int]
    ) -> None:
        self._limits = limits
        self._starting = Starting(limits, ratios, cursors)
        self._closing = GroupCloser(limits)
        self._shipping = Shipping(limits, first_step)
        self._weights = WeightVersions(PolicyVersion(first_step - 1))
        self._fruitless = UselessStreak(limits.max_fruitless_groups)
        self.finished = False

    @property
    def num_in_flight(self) -> int:
        return self._starting.num_in_flight

    @property
    def max_in_flight(self) -> int:
        """As many may run now."""
        return self._starting.concurrency.limit

    @property
    def is_held_back(self) -> bool:
        """Whether the payload budget alone keeps the next group from starting."""
        return self._starting.is_held_back

    @property
    def silent_envs(self) -> tuple[str, ...]:
        """Environments that others do not wait for."""
        return self._starting.silent_envs

    @property
    def live_bytes(self) -> int:
        """Payload written and not yet released."""
        return self._starting.governor.live_bytes

    @property
    def num_retries(self) -> int:
        return self._starting.retries.num_made

    @property
    def num_ready(self) -> int:
        """Rollouts that wait to be shipped."""
        return self._shipping.ready.num_rollouts

    @property
    def rollouts_a_batch(self) -> int:
        return self._shipping.ready.rollouts_a_batch

    @property
    def is_full(self) -> bool:
        """Whether a batch is complete, shipped or not."""
        return self._shipping.ready.is_full

    @property
    def next_step(self) -> Step:
        return self._shipping.next_step

    @property
    def applied_version(self) -> PolicyVersion:
        return self._weights.applied

    def pooled(self, pool: Pool) -> dict[str, int]:
        """How many tasks of each environment are in a pool."""
        return self._starting.tasks.pooled(pool)

    @property
    def waits_for(self) -> str:
        """What the next step is waiting for, in words."""
        if self._shipping.is_over:
            return self._waits_for_the_end
        if self.is_full:
            return f"the trainer: it has published version {self._weights.published}"
        if self._closing.num_groups:
            return f"advantages of {self._closing.num_groups} groups"
        if self.is_held_back:
            return "payload to be trained: payload.budget_mb is used up"
        if self._starting.groups.num_in_flight:
            return "rollouts"
        if self._weights.updating is not None:
            return f"the engine to load version {self._weights.updating}"
        if self._shipping.num_shipped:
            return "the trainer"
        if not self._starting.rate.allows:
            return "its turn: orchestrator.rollouts_a_minute is used up"
        return "tasks of the environments"

    @property
    def _waits_for_the_end(self) -> str:
        if self._weights.published < self._limits.max_steps:
            return "the trainer: the last batch is shipped"
        if self._weights.updating is not None:
            return f"the engine to load version {self._weights.updating}"
        return self._starting.evals.waits_for or "rollouts that were cancelled"

    def on_event(self, event: Event) -> list[Command]:
        if self.finished:
            return []
        commands = self._on(event) + self._ship()
        return commands + self._starting.start(self._demand) + self._check()

    def _on(self, event: Event) -> list[Command]:
        starting = self._starting
        match event:
            case Started(restored=restored, whole_groups=whole_groups):
                starting.whole_groups = whole_groups
                return [*self._restore(restored), *starting.evals.applied(starting.version)]
            case Tick(now_s=now_s):
                return starting.tick(now_s)
            case TasksArrived():
                return [*starting.arrived(event)]
            case Settled():
                return self._on_settled(event)
            case Credited(group_id=id, advantages=credit):
                closed = self._closing.credited(id, credit)
                return self._keep(closed) if closed else []
            case VersionPublished():
                return self._on_published(event)
            case WeightsApplied(version=version):
                return self._on_applied(version)
            case EngineLoad():
                starting.concurrency.engine_load(event, self.num_in_flight)
            case WorkerLag(p90_s=lag_s):
                starting.concurrency.worker_lag(lag_s)
        return []

    @property
    def _demand(self) -> Demand:
        a_batch = self._shipping.ready.rollouts_a_batch
        return Demand(
            settled=self._closing.num_rollouts + self._shipping.ready.worth,
            training=(self._shipping.next_step - 1 - self._weights.applied) * a_batch,
            a_batch=a_batch,
            steps_left=self._shipping.steps_left,
        )

    def _restore(self, restored: Restored) -> list[Command]:
        """Go on where a run was: its batches train, what settled is used, the rest runs again."""
        self._starting.version = self._weights.applied
        self._starting.next_group = restored.next_group
        self._starting.evals.done_before(restored.evaluated)
        for one in restored.pooled:
            self._starting.tasks.put(one.env, one.task, one.pool)
        for batch in restored.batches:
            self._shipping.restore(batch)
            for closed in batch.closed:
                for member in closed.group.members:
                    self._starting.governor.hold(member.scored.ref.length)
        return [command for group in restored.groups for command in self._reopen(group)]

    def _reopen(self, group: RestoredGroup) -> list[Command]:
        commands: list[Command] = [*self._starting.reopen(group)]
        for settled in group.settled:
            commands += self._on_settled(settled, may_retry=False)
        return commands

    def _on_settled(self, event: Settled, *, may_retry: bool = True) -> list[Command]:
        starting = self._starting
        group = starting.groups.group_of(event.rollout_id)
        is_eval = starting.evals.waits_for_rollout(event.rollout_id)
        if group is None and not is_eval:
            return []  # a duplicate
        if isinstance(event.outcome, Scored):
            starting.governor.hold(event.outcome.ref.length)
        if group is None:
            return self._on_evaluated(event)
        may_retry = may_retry and not self._shipping.is_over
        next = starting.settle(event, may_retry=may_retry)
        if isinstance(next, Dispatch):
            return [next]
        return self._close(next, group.task) if next else []

    def _on_evaluated(self, event: Settled) -> list[Command]:
        self._starting.patience.moved()
        commands = self._starting.evals.settle(event)
        for one in commands:
            if isinstance(one, RecordEvalGroup):
                self._release(one.closed)
        return [*commands]

    def _close(self, group: Group, task: Task) -> list[Command]:
        """All rollouts of a group have settled."""
        rewards = [member.scored.reward for member in group.members]
        judged = rewards if len(rewards) >= MIN_SCORED and not group.cancelled else []
        moved = self._starting.tasks.closed(group.env, task, judged)
        closed = self._closing.close(group)
        return [*moved, *(self._keep(closed) if isinstance(closed, ClosedGroup) else [closed])]

    def _keep(self, closed: ClosedGroup) -> list[Command]:
        """Keep a group for a batch, or let it go."""
        self._fruitless.closed(closed)
        if closed.fate != "trained":
            return self._discard(closed)
        self._shipping.ready.add(closed)
        return []

    def _discard(self, closed: ClosedGroup) -> list[Command]:
        self._starting.tasks.useless(closed.group.env)
        self._release(closed)
        return [DiscardGroup(self._shipping.discard(closed), closed)]

    def _release(self, closed: ClosedGroup) -> None:
        for member in closed.group.members:
            self._starting.governor.release(member.scored.ref.length)

    def _on_published(self, event: VersionPublished) -> list[Command]:
        """The batch of that step is consumed; what is in flight may have become too old."""
        self._starting.patience.moved()
        self._weights.published = event.version
        trained = self._shipping.published(event.version)
        for one in trained:
            self._release(one)
        commands: list[Command] = [ReleasePayload(_refs(trained))]
        is_last = event.version == self._limits.max_steps
        if is_last and not self._starting.evals.is_due(event.version):
            return commands
        oldest = event.version - self._limits.max_off_policy_steps
        reason = f"older than version {oldest}, the oldest that may still train"
        old = self._starting.groups.older_than(oldest)
        commands += [CancelRollout(env, id, reason) for env, id in old]
        return [*commands, *self._weights.wants(event)]

    def _on_applied(self, version: PolicyVersion) -> list[Command]:
        self._starting.patience.moved()
        self._starting.version = version
        return [*self._weights.on_applied(version), *self._starting.evals.applied(version)]

    def _ship(self) -> list[Command]:
        """Ship batches while there are enough rollouts and the trainer is not too far behind."""
        commands: list[Command] = []
        while True:
            for closed in self._shipping.take_stale():
                commands += self._discard(closed)
            ship = self._shipping.take_batch(self._weights.published)
            if ship is None:
                return commands
            commands.append(ship)
            if self._shipping.is_over:
                reason, running = "the last batch is shipped", self._starting.groups.all_in_flight()
                commands += [CancelRollout(env, id, reason) for env, id in running]

    def _check(self) -> list[Command]:
        """Finish when all is trained and settled; give up instead of waiting for what cannot be."""
        evals, published = self._starting.evals, self._weights.published
        waits = self.num_in_flight or self._closing.num_groups or evals.is_running
        if published == self._limits.max_steps and not waits and not evals.is_due(published):
            self.finished = True
            return [Finish()]
        reason = self._why_stuck()
        if not reason:
            return []
        self.finished = True
        return [GiveUp(reason)]

    def _why_stuck(self) -> str:
        if env := self._starting.tasks.empty_env:
            return f"environment '{env}' has no tasks"
        if self._is_starved():
            governor = self._starting.governor
            return (
                f"a batch does not fit into payload.budget_mb: {self.num_ready} rollouts wait for "
                f"others with {governor.live_bytes} bytes, a rollout has about "
                f"{governor.mean_bytes:.0f}; raise it or lower orchestrator.batch_size"
            )
        if self._starting.patience.is_stuck:
            return (
                f"nothing has moved for {self._limits.quiet_s:g} s (orchestrator.max_quiet_s): step "
                f"{self.next_step} waits for {self.waits_for}"
            )
        return self._fruitless.reason

    def _is_starved(self) -> bool:
        """Nothing runs, nothing trains, and the payload budget lets nothing start."""
        waits_for_others = (
            self.num_in_flight or self._closing.num_groups or self._shipping.num_shipped
            or self._weights.updating
        )  # fmt: skip
        full = not self._starting.governor.has_room(self._limits.group_size)
        return not waits_for_others and full and not self._shipping.is_over


def _refs(closed: list[ClosedGroup]) -> tuple[PayloadRef, ...]:
    """Of all members: those that were left out were kept for the record."""
    return tuple(member.scored.ref for one in closed for member in one.group.members)
