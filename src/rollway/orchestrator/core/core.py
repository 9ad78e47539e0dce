"""The orchestrator's decisions: what runs, when a group closes, what ships, what is too old."""

from collections.abc import Iterable, Mapping

from ...config.specs import CoreSpec
from ...records.engine import EngineLoad
from ...records.first_rollouts import FirstRollouts
from ...records.group import ClosedGroup, Group
from ...records.ids import GroupId, PolicyVersion, RolloutId, Step, make_rollout_id
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
    Commands,
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
    PayloadGrew,
    Started,
    TasksArrived,
    Tick,
    VersionPublished,
    WeightsApplied,
    WorkerLag,
)
from .rollouts.admission import Admission
from .rollouts.evals import Evaluations
from .rollouts.groups import OpenGroup, OpenGroups, Running, Stragglers
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
        self.first_rollouts = FirstRollouts()
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

    def view(self) -> CoreView:
        return state.view(self)

    def on_event(self, event: Event) -> Commands:
        if self.finished:
            return []
        commands = self._on(event) + self._ship()
        return commands + self._start() + self._end_if_over()

    def _on(self, event: Event) -> Commands:
        concurrency = self.admission.concurrency
        match event:
            case Started(restored=restored, whole_groups=whole_groups):
                self._whole_groups = whole_groups
                return self._restore(restored) + self.evals.applied(self.weights.applied)
            case Tick(now_s=now_s, has_room=has_room):
                self.admission.has_disk = has_room
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
                return self.weights.on_applied(version) + self.evals.applied(version)
            case EngineLoad():
                concurrency.on_engine_load(event, self.num_in_flight)
            case WorkerLag(p90_s=lag_s):
                concurrency.on_worker_lag(lag_s)
            case PayloadGrew(sizes=sizes):
                known = {name: size for name, size in sizes.items() if self._is_open(name)}
                self.admission.budget.grew(known)
        return []

    def _restore(self, restored: Restored) -> Commands:
        """Continue an interrupted run: shipped batches are trained, settled rollouts are used, and the
        other rollouts run again."""
        self._next_group = restored.next_group
        self.evals.last = restored.evaluated
        for pooled in restored.pooled:
            self.tasks.put(pooled.env, pooled.task, pooled.pool)
        for payload in restored.kept:
            self.shipping.keep(payload)
        for batch in restored.batches:
            self.shipping.restore(batch)
            for closed in batch.closed:
                for ref in closed.refs:
                    self.admission.budget.hold(ref.length)
        return [command for group in restored.groups for command in self._reopen(group)]

    def _reopen(self, restored: RestoredGroup) -> Commands:
        waiting, version = set(restored.ids), self.weights.applied
        group = OpenGroup(restored.id, restored.env, restored.task, version, waiting)
        self._open(group)
        settled = {end.rollout_id for end in restored.settled}
        missing = [name for name in restored.ids if name not in settled]
        commands = self._dispatch(group, missing) if missing else []
        for end in restored.settled:
            commands += self._on_settled(end, may_retry=False)
        return commands

    def _on_tick(self, now_s: float) -> Commands:
        self.patience.tick(now_s)
        if not self.admission.has_disk:
            self.patience.note_change()  # somebody must make room, and the run waits for that
        self.admission.rate.tick(now_s)
        late = self.groups.waiting_in(self.stragglers.take_due(now_s))
        commands = _cancel(late, "the rest of its group has settled")
        patience_s = self.spec.orchestrator.env_patience_s
        reason = f"no rollout of the environment settled for {patience_s:g} s"
        for env in state.silent_envs(self):
            commands += _cancel(self.evals.abandon(env), reason)
        return commands + self.evals.report_if_settled()

    def _on_tasks(self, event: TasksArrived) -> Commands:
        owes_more = self.groups.in_flight[event.env] > 0
        self.patience.answered(event.env, owes_more=owes_more)
        if event.split == "eval":
            return self.evals.arrived(event)
        self.tasks.arrived(event)
        return []

    def _on_settled(self, event: Settled, *, may_retry: bool = True) -> Commands:
        rollout_id, outcome = event.rollout_id, event.outcome
        if not self._is_open(rollout_id):
            return []  # a duplicate
        group = self.groups.group_of(rollout_id)
        self.admission.budget.settled(rollout_id)
        if isinstance(outcome, Scored):
            self.admission.budget.hold(outcome.ref.length)
        self.first_rollouts.settled(outcome)
        if group is None:
            return self._on_evaluated(event)
        retry, may_retry = None, may_retry and not self.shipping.is_over
        if may_retry and group.env not in self._whole_groups:
            retry = self.retries.next_id(rollout_id, outcome)
        settled_group = self.groups.settle(event, retry)
        self._note_answer(group.env, event)
        self.stragglers.settled(group, self.patience.now_s)
        if retry is not None:
            return self._dispatch(group, [retry])
        return self._close(settled_group, group.task) if settled_group else []

    def _is_open(self, rollout_id: RolloutId) -> bool:
        groups = self.groups, self.evals.groups
        return any(found.group_of(rollout_id) is not None for found in groups)

    def _note_answer(self, env: str, event: Settled) -> None:
        owes_more = self.groups.in_flight[env] > 0 or self.tasks.is_waiting_for(env)
        if not isinstance(event.outcome, Cancelled):
            self.patience.answered(env, owes_more=owes_more)
        elif not owes_more:
            self.patience.cancelled(env)

    def _on_evaluated(self, event: Settled) -> Commands:
        self.patience.note_change()
        commands = self.evals.settle(event)
        for command in commands:
            if isinstance(command, RecordEvalGroup):
                self._release(command.closed)
        return commands

    def _close(self, group: Group, task: Task) -> Commands:
        rewards = [member.scored.reward for member in group.members]
        judged = rewards if len(rewards) >= MIN_SCORED and not group.cancelled else []
        moved = self.tasks.closed(group.env, task, judged)
        closed = self.closer.close(group)
        kept = self._keep(closed) if isinstance(closed, ClosedGroup) else [closed]
        return [*moved, *kept]

    def _keep(self, closed: ClosedGroup) -> Commands:
        self.useless.closed(closed)
        if closed.fate != "trained":
            return self._discard(closed)
        self.shipping.ready.add(closed)
        return []

    def _discard(self, closed: ClosedGroup) -> Commands:
        self.tasks.did_not_train(closed.group.env)
        self._release(closed)
        return [DiscardGroup(self.shipping.discard(closed), closed)]

    def _release(self, closed: ClosedGroup) -> None:
        self.admission.budget.live_bytes -= sum(ref.length for ref in closed.refs)

    def _on_published(self, event: VersionPublished) -> Commands:
        """The batch of that step is trained, and what is in flight may have become too old."""
        self.patience.note_change()
        self.weights.published = event.version
        trained = self.shipping.published(event.version)
        for closed in trained:
            self._release(closed)
        saved = event.version if event.saved is None else event.saved
        release = ReleasePayload(self.shipping.take_unneeded(saved))
        is_last = event.version == self.spec.max_steps
        if is_last and not self.evals.is_due(event.version):
            return [release]
        max_staleness = self.spec.orchestrator.max_off_policy_steps
        oldest = oldest_trainable(Step(event.version + 1), max_staleness)
        reason = f"older than version {oldest}, the oldest that may still train"
        cancels = _cancel(self.groups.older_than(oldest), reason)
        return [release, *cancels, *self.weights.update_to(event)]

    def _ship(self) -> Commands:
        """Ship batches while there are enough rollouts and the trainer is not too far behind."""
        commands: Commands = []
        while True:
            for closed in self.shipping.take_stale():
                commands += self._discard(closed)
            ship = self.shipping.take_batch(self.weights.published)
            if ship is None:
                return commands
            commands.append(ship)
            if self.shipping.is_over:
                commands += _cancel(self.groups.all_in_flight(), "the last batch is shipped")

    def _start(self) -> Commands:
        """Start what every bound leaves room for. Evaluations come first, and have their own share."""
        commands = self._start_evals()
        size = self.spec.orchestrator.group_size
        silent = state.silent_envs(self)
        while state.may_start_group(self, silent):
            taken = self.tasks.take(silent, state.full_envs(self))
            if taken is None:
                break
            group, rollout_ids = self._new_group(*taken, size)
            self._open(group)
            self.admission.rate.started(size)
            self.retries.num_started += size
            commands += self._dispatch(group, rollout_ids)
        if self.shipping.steps_left:
            for pull in self.tasks.pull():
                self.patience.asked(pull.env)
                commands.append(pull)
        return commands

    def _start_evals(self) -> Commands:
        commands: Commands = []
        limit, size = self.admission.concurrency.limit, self.evals.group_size
        while self.admission.has_disk and self.num_in_flight + size <= limit:
            taken = self.evals.take(limit)
            if taken is None:
                break
            group, rollout_ids = self._new_group(*taken, size)
            self.evals.groups.open(group)
            commands += self._dispatch(group, rollout_ids, "eval")
        return commands

    def _new_group(
        self, env: str, task: Task, size: int
    ) -> tuple[OpenGroup, list[RolloutId]]:
        group_id = self._next_group
        self._next_group = GroupId(group_id + 1)
        rollout_ids = [make_rollout_id(group_id, member) for member in range(size)]
        group = OpenGroup(group_id, env, task, self.weights.applied, set(rollout_ids))
        return group, rollout_ids

    def _open(self, group: OpenGroup) -> None:
        self.patience.asked(group.env)
        self.groups.open(group)

    def _dispatch(
        self, group: OpenGroup, rollout_ids: Iterable[RolloutId], split: Split = "train"
    ) -> Commands:
        env, version = group.env, self.weights.applied
        position, ids = self.tasks.position(env), tuple(rollout_ids)
        return [Dispatch(env, group.id, ids, group.task, version, position, split)]

    def _end_if_over(self) -> Commands:
        """Finish when everything is trained and settled, or give up if something cannot come."""
        published = self.weights.published
        waits = self.num_in_flight or self.closer.num_groups or self.evals.is_running
        if (
            published == self.spec.max_steps
            and not waits
            and not self.evals.is_due(published)
        ):
            self.finished = True
            return [Finish()]
        reason = state.why_stuck(self)
        self.finished = bool(reason)
        return [GiveUp(reason)] if reason else []


def _cancel(running: list[Running], reason: str) -> Commands:
    return [CancelRollout(env, rollout_id, reason) for env, rollout_id in running]
