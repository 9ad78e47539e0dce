"""The orchestrator's decisions: what runs, when a group closes, what ships, what is too old."""

from collections.abc import Mapping

from ...config.specs import CoreSpec
from ...records.engine import EngineLoad
from ...records.group import ClosedGroup, Group
from ...records.ids import GroupId, PolicyVersion, RolloutId, Step, make_rollout_id
from ...records.payload import PayloadRef
from ...records.restored import Restored, RestoredGroup
from ...records.rollout import Cancelled, Scored, Settled
from ...records.situation import CoreView
from ...records.task import Split, Task
from . import state
from .batches.closer import MIN_SCORED, GroupCloser
from .batches.shipping import Shipping, WeightVersions
from .batches.staleness import oldest_trainable
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
from .rollouts.admission import Admission
from .rollouts.evals import Evaluations
from .rollouts.groups import OpenGroup, OpenGroups, Stragglers
from .rollouts.patience import Patience, UselessStreak
from .rollouts.retries import Retries
from .rollouts.tasks import TaskMix


class Core:
    """The state of a run. Every dispatched rollout is in flight, in a group, in a batch, or gone.

    `on_event` is the only way in. Each noun below owns one rule, and only the core calls them.
    """

    def __init__(self, spec: CoreSpec, first_step: Step, cursors: Mapping[str, int]) -> None:
        settings = spec.orchestrator
        tasks_ahead = 2 * max(1, spec.max_outstanding // settings.group_size)
        self.spec = spec
        self.tasks = TaskMix(spec.ratios, cursors, tasks_ahead, spec.difficulty)
        self.admission = Admission(spec)
        self.groups = OpenGroups()
        self.stragglers = Stragglers(settings.stragglers_after)
        self.evals = Evaluations(spec)
        self.retries = Retries(spec.retries)
        self.patience = Patience(settings.env_patience_s)
        self.useless = UselessStreak(settings.max_useless_groups)
        self.closer = GroupCloser(spec)
        self.shipping = Shipping(spec, first_step)
        self.weights = WeightVersions(PolicyVersion(first_step - 1))
        self.finished = False
        self._whole_groups: frozenset[str] = frozenset()
        self._next_group = GroupId(0)

    @property
    def num_in_flight(self) -> int:
        return self.groups.num_in_flight + self.evals.num_in_flight

    @property
    def waits_for(self) -> str:
        """What the next step waits for, in words."""
        return state.waits_for(self)

    def view(self) -> CoreView:
        """Return the numbers that people and metrics look at."""
        return state.view(self)

    def on_event(self, event: Event) -> list[Command]:
        if self.finished:
            return []
        commands = self._on(event) + self._ship()
        return commands + self._start() + self._end_if_over()

    def _on(self, event: Event) -> list[Command]:
        match event:
            case Started(restored=restored, whole_groups=whole_groups):
                self._whole_groups = whole_groups
                return [*self._restore(restored), *self.evals.applied(self.weights.applied)]
            case Tick(now_s=now_s):
                return self._on_tick(now_s)
            case TasksArrived():
                return self._on_tasks(event)
            case Settled():
                return self._on_settled(event)
            case Credited(group_id=group_id, advantages=advantages):
                closed = self.closer.credited(group_id, advantages)
                return self._keep(closed) if closed else []
            case VersionPublished():
                return self._on_published(event)
            case WeightsApplied(version=version):
                self.patience.note_change()
                return [*self.weights.on_applied(version), *self.evals.applied(version)]
            case EngineLoad():
                self.admission.concurrency.on_engine_load(event, self.num_in_flight)
            case WorkerLag(p90_s=lag_s):
                self.admission.concurrency.on_worker_lag(lag_s)
        return []

    def _restore(self, restored: Restored) -> list[Command]:
        """Continue an interrupted run: its batches train, what has settled is used, the rest runs
        again."""
        self._next_group = restored.next_group
        self.evals.restore(restored.evaluated)
        for pooled in restored.pooled:
            self.tasks.put(pooled.env, pooled.task, pooled.pool)
        for batch in restored.batches:
            self.shipping.restore(batch)
            for closed in batch.closed:
                for member in closed.group.members:
                    self.admission.budget.hold(member.scored.ref.length)
        return [command for group in restored.groups for command in self._reopen(group)]

    def _reopen(self, group: RestoredGroup) -> list[Command]:
        self._open(group.id, group.env, group.task, list(group.ids))
        settled = {end.rollout_id for end in group.settled}
        missing = [rollout_id for rollout_id in group.ids if rollout_id not in settled]
        commands = self._dispatch(group.env, group.id, missing, group.task) if missing else []
        for end in group.settled:
            commands += self._on_settled(end, may_retry=False)
        return commands

    def _on_tick(self, now_s: float) -> list[Command]:
        """Time passes: cancel what has been waited for long enough."""
        self.patience.tick(now_s)
        self.admission.rate.tick(now_s)
        commands: list[Command] = [
            CancelRollout(self.groups.env_of(group_id), rollout_id, "the rest of its group has settled")
            for group_id in self.stragglers.take_due(now_s)
            for rollout_id in self.groups.waiting_in(group_id)
        ]
        patience_s = self.spec.orchestrator.env_patience_s
        reason = f"no rollout of the environment settled for {patience_s:g} s"
        for env in state.silent_envs(self):
            abandoned = self.evals.abandon(env)
            commands += [CancelRollout(env, rollout_id, reason) for rollout_id in abandoned]
        return commands

    def _on_tasks(self, event: TasksArrived) -> list[Command]:
        self.patience.answered(event.env, owes_more=self.groups.in_flight_of(event.env) > 0)
        if event.split == "eval":
            return [*self.evals.arrived(event.env, event.start, event.tasks, event.exhausted)]
        self.tasks.arrived(event.env, event.start, event.tasks, event.exhausted)
        return []

    def _on_settled(self, event: Settled, *, may_retry: bool = True) -> list[Command]:
        group = self.groups.group_of(event.rollout_id)
        if group is None and not self.evals.waits_for_rollout(event.rollout_id):
            return []  # a duplicate
        if isinstance(event.outcome, Scored):
            self.admission.budget.hold(event.outcome.ref.length)
        if group is None:
            return self._on_evaluated(event)
        retry = None
        if may_retry and not self.shipping.is_over and group.env not in self._whole_groups:
            retry = self.retries.next_id(event.rollout_id, event.outcome)
        settled_group = self.groups.settle(event, retry)
        self._note_answer(group.env, event)
        self.stragglers.settled(group, self.patience.now_s)
        if retry is not None:
            return self._dispatch(group.env, group.id, [retry], group.task)
        return self._close(settled_group, group.task) if settled_group else []

    def _note_answer(self, env: str, event: Settled) -> None:
        owes_more = self.groups.in_flight_of(env) > 0 or self.tasks.is_waiting_for(env)
        if not isinstance(event.outcome, Cancelled):
            self.patience.answered(env, owes_more=owes_more)
        elif not owes_more:
            self.patience.cancelled(env)

    def _on_evaluated(self, event: Settled) -> list[Command]:
        self.patience.note_change()
        commands = self.evals.settle(event)
        for command in commands:
            if isinstance(command, RecordEvalGroup):
                self._release(command.closed)
        return [*commands]

    def _close(self, group: Group, task: Task) -> list[Command]:
        """All rollouts of a group have settled."""
        rewards = [member.scored.reward for member in group.members]
        judged = rewards if len(rewards) >= MIN_SCORED and not group.cancelled else []
        moved = self.tasks.closed(group.env, task, judged)
        closed = self.closer.close(group)
        return [*moved, *(self._keep(closed) if isinstance(closed, ClosedGroup) else [closed])]

    def _keep(self, closed: ClosedGroup) -> list[Command]:
        """Keep a group for a batch, or discard it."""
        self.useless.closed(closed)
        if closed.fate != "trained":
            return self._discard(closed)
        self.shipping.ready.add(closed)
        return []

    def _discard(self, closed: ClosedGroup) -> list[Command]:
        self.tasks.did_not_train(closed.group.env)
        self._release(closed)
        return [DiscardGroup(self.shipping.discard(closed), closed)]

    def _release(self, closed: ClosedGroup) -> None:
        for member in closed.group.members:
            self.admission.budget.release(member.scored.ref.length)

    def _on_published(self, event: VersionPublished) -> list[Command]:
        """The batch of that step is trained, and what is in flight may have become too old."""
        self.patience.note_change()
        self.weights.published = event.version
        trained = self.shipping.published(event.version)
        for closed in trained:
            self._release(closed)
        commands: list[Command] = [ReleasePayload(_refs(trained))]
        is_last = event.version == self.spec.max_steps
        if is_last and not self.evals.is_due(event.version):
            return commands
        next_step = Step(event.version + 1)
        oldest = oldest_trainable(next_step, self.spec.orchestrator.max_off_policy_steps)
        reason = f"older than version {oldest}, the oldest that may still train"
        commands += [
            CancelRollout(env, rollout_id, reason) for env, rollout_id in self.groups.older_than(oldest)
        ]
        return [*commands, *self.weights.update_to(event)]

    def _ship(self) -> list[Command]:
        """Ship batches while there are enough rollouts and the trainer is not too far behind."""
        commands: list[Command] = []
        while True:
            for closed in self.shipping.take_stale():
                commands += self._discard(closed)
            ship = self.shipping.take_batch(self.weights.published)
            if ship is None:
                return commands
            commands.append(ship)
            if self.shipping.is_over:
                reason, running = "the last batch is shipped", self.groups.all_in_flight()
                commands += [CancelRollout(env, rollout_id, reason) for env, rollout_id in running]

    def _start(self) -> list[Command]:
        """Start what every bound leaves room for. Evaluations come first: they have a share to
        themselves."""
        commands = self._start_evals()
        silent = state.silent_envs(self)
        while self.admission.allows_group(state.demand(self, silent)):
            taken = self.tasks.take(silent, state.full_envs(self))
            if taken is None:
                break
            env, task = taken
            group_id, rollout_ids = self._new_group(self.spec.orchestrator.group_size)
            self._open(group_id, env, task, rollout_ids)
            self.admission.rate.started(len(rollout_ids))
            self.retries.started(len(rollout_ids))
            commands += self._dispatch(env, group_id, rollout_ids, task)
        if self.shipping.steps_left:
            for pull in self.tasks.pull():
                self.patience.asked(pull.env)
                commands.append(pull)
        return commands

    def _start_evals(self) -> list[Command]:
        commands: list[Command] = []
        limit = self.admission.concurrency.limit
        while self.num_in_flight + self.evals.group_size <= limit:
            taken = self.evals.take(limit)
            if taken is None:
                break
            env, task = taken
            group_id, rollout_ids = self._new_group(self.evals.group_size)
            self.evals.open(OpenGroup(group_id, env, task, self.weights.applied, set(rollout_ids)))
            commands += self._dispatch(env, group_id, rollout_ids, task, "eval")
        return commands

    def _new_group(self, size: int) -> tuple[GroupId, list[RolloutId]]:
        group_id = self._next_group
        self._next_group = GroupId(group_id + 1)
        return group_id, [make_rollout_id(group_id, member) for member in range(size)]

    def _open(self, group_id: GroupId, env: str, task: Task, rollout_ids: list[RolloutId]) -> None:
        self.patience.asked(env)
        self.groups.open(OpenGroup(group_id, env, task, self.weights.applied, set(rollout_ids)))

    def _dispatch(
        self,
        env: str,
        group_id: GroupId,
        rollout_ids: list[RolloutId],
        task: Task,
        split: Split = "train",
    ) -> list[Command]:
        version, position = self.weights.applied, self.tasks.position(env)
        return [Dispatch(env, group_id, tuple(rollout_ids), task, version, position, split)]

    def _end_if_over(self) -> list[Command]:
        """Finish when everything is trained and settled. Give up instead of waiting for what cannot
        come."""
        published = self.weights.published
        waits = self.num_in_flight or self.closer.num_groups or self.evals.is_running
        if published == self.spec.max_steps and not waits and not self.evals.is_due(published):
            self.finished = True
            return [Finish()]
        reason = state.why_stuck(self)
        self.finished = bool(reason)
        return [GiveUp(reason)] if reason else []


def _refs(groups: list[ClosedGroup]) -> tuple[PayloadRef, ...]:
    """Return the refs of all members, also of those that a filter left out."""
    return tuple(member.scored.ref for closed in groups for member in closed.group.members)
