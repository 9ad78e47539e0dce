"""The orchestrator's decisions: what to dispatch, when a group counts, what ships, what is stale.

Step n trains version n − 1 into version n. A rollout may train at step n if its first token was drawn
by version n − 1 − max_off_policy_steps or later.
"""

from collections import Counter, deque

import msgspec
from msgspec import Struct

from ...records.group import ClosedGroup, Fate, Group
from ...records.ids import GroupId, PolicyVersion, RolloutId, Step, rollout_id
from ...records.payload import PayloadRef
from ...records.restored import Restored
from ...records.rollout import Detection, Scored, Settled
from ...records.task import Task
from ..batching.manifest import plan_batch
from ..credit.baselines import BASELINES
from ..credit.length import shortened
from ..filters.filters import is_flat, left_out
from .commands import (
    CancelRollout,
    Command,
    Credit,
    Discard,
    Dispatch,
    Finish,
    GiveUp,
    Release,
    Ship,
    UpdateWeights,
)
from .events import (
    Credited,
    Event,
    Started,
    TasksArrived,
    Tick,
    VersionPublished,
    WeightsApplied,
)
from .governor import ByteGovernor
from .groups import OpenGroups
from .patience import Patience
from .tasks import TaskMix

MIN_SCORED = 2
"""Fewer scored rollouts than this make no baseline."""


class Limits(Struct, frozen=True):
    """The bounds of a run."""

    batch_size: int
    group_size: int
    max_in_flight: int
    max_outstanding: int
    max_off_policy_steps: int
    max_fruitless_groups: int
    max_steps: int
    micro_batch_tokens: int
    payload_bytes: int
    drop_zero_advantage: bool
    ranks: int = 1
    """Of the trainer: micro-batches are planned for each."""
    patience_s: float = float("inf")
    """Silence of an environment after which others train without it."""
    enforced: frozenset[Detection] = frozenset()
    """Signs that keep a rollout from training."""
    asks_for_credit: bool = False
    """Whether advantages come from outside, by `Credit` and `Credited`, instead of from `baseline`."""
    baseline: str = "grpo"
    length_penalty: float = 0.0
    length_by_turns: bool = False
    correct_at: float = 1.0


class Core:
    """The state of a run. Every dispatched rollout is in flight, in a group, in a batch, or gone."""

    def __init__(
        self, limits: Limits, ratios: dict[str, float], first_step: Step, cursors: dict[str, int]
    ) -> None:
        self._limits = limits
        ahead = 2 * max(1, limits.max_outstanding // limits.group_size)
        self._tasks = TaskMix(ratios, cursors, ahead)
        self._groups = OpenGroups()
        self._governor = ByteGovernor(limits.payload_bytes)
        self._patience = Patience(limits.patience_s)
        self._most = _most_in_flight(limits, ratios)
        self._next_group = GroupId(0)
        self._crediting: dict[GroupId, Group] = {}
        self._ready: deque[ClosedGroup] = deque()
        self._closed: list[ClosedGroup] = []
        self._shipped: dict[Step, Ship] = {}
        self._next_step = first_step
        self._published = PolicyVersion(first_step - 1)
        self._applied = PolicyVersion(first_step - 1)
        self._updating: VersionPublished | None = None
        self._newest: VersionPublished | None = None
        self._num_fruitless = 0
        self._fruitless: Counter[str] = Counter()
        self.is_held_back = False
        """Whether the payload budget alone keeps the next group from starting."""
        self.finished = False

    @property
    def num_in_flight(self) -> int:
        return self._groups.num_in_flight

    @property
    def num_ready(self) -> int:
        """Rollouts that wait to be shipped."""
        return sum(one.num_trained for one in self._ready)

    @property
    def is_full(self) -> bool:
        """Whether a batch is complete, shipped or not."""
        return self.num_ready >= self._limits.batch_size

    @property
    def live_bytes(self) -> int:
        """Payload written and not yet released."""
        return self._governor.live_bytes

    @property
    def next_step(self) -> Step:
        return self._next_step

    @property
    def applied_version(self) -> PolicyVersion:
        return self._applied

    @property
    def waits_for(self) -> str:
        """What the next step is waiting for, in words."""
        if self._next_step > self._limits.max_steps:
            return "the trainer: the last batch is shipped"
        if self.is_full:
            return f"the trainer: it has published version {self._published}"
        if self._crediting:
            return f"advantages of {len(self._crediting)} groups"
        if self.is_held_back:
            return "payload to be trained: payload.budget_mb is used up"
        if self._groups.num_in_flight:
            return "rollouts"
        if self._updating is not None:
            return f"the engine to load version {self._updating.version}"
        if self._shipped:
            return "the trainer"
        return "tasks of the environments"

    def on_event(self, event: Event) -> list[Command]:
        if self.finished:
            return []
        match event:
            case Started(restored=restored):
                commands: list[Command] = self._restore(restored)
            case Tick(now_s=now_s):
                self._patience.tick(now_s)
                commands = []
            case TasksArrived(env=env, start=start, tasks=tasks, exhausted=exhausted):
                self._tasks.arrived(env, start, tasks, exhausted)
                commands = []
            case Settled():
                commands = self._on_settled(event)
            case Credited(group_id=id, advantages=credit):
                group = self._crediting.pop(id, None)
                commands = self._close(group, credit) if group else []
            case VersionPublished():
                commands = self._on_published(event)
            case WeightsApplied(version=version):
                commands = self._on_applied(version)
        return commands + self._ship() + self._dispatch() + self._check()

    def _restore(self, restored: Restored) -> list[Command]:
        """Go on where a run was: its batches train, what settled is used, the rest runs again."""
        self._next_group = restored.next_group
        for batch in restored.batches:
            step = batch.manifest.step
            self._shipped[step] = Ship(batch.manifest, batch.closed)
            self._next_step = Step(step + 1)
            for one in batch.closed:
                for member in one.group.members:
                    self._governor.hold(member.scored.ref.length)
        commands: list[Command] = []
        for group in restored.groups:
            self._open(group.id, group.env, group.task, list(group.ids))
            for settled in group.settled:
                commands += self._on_settled(settled)
            ended = {settled.rollout_id for settled in group.settled}
            position = restored.cursors[group.env]
            commands += [
                Dispatch(group.env, group.id, id, group.task, self._applied, position)
                for id in group.ids if id not in ended
            ]  # fmt: skip
        return commands

    def _on_settled(self, event: Settled) -> list[Command]:
        if not self._groups.waits_for(event.rollout_id):
            return []  # a duplicate
        if isinstance(event.outcome, Scored):
            self._governor.hold(event.outcome.ref.length)
        self._patience.heard(self._groups.env_of(event.rollout_id))
        group = self._groups.settle(event)
        return self._credit(group) if group else []

    def _credit(self, group: Group) -> list[Command]:
        """Close a group with its advantages, here or once they have come."""
        limits = self._limits
        scored = [member.scored for member in group.members]
        rewards = tuple(one.reward for one in scored)
        tokens = tuple(one.num_trainable for one in scored)
        turns = tuple(one.num_turns for one in scored)
        if not limits.asks_for_credit or len(scored) < MIN_SCORED:
            lengths = turns if limits.length_by_turns else tokens
            worth = shortened(rewards, lengths, limits.length_penalty, limits.correct_at)
            return self._close(group, BASELINES[limits.baseline](worth))
        self._crediting[group.id] = group
        return [Credit(group.id, rewards, tokens, turns)]

    def _close(self, group: Group, credit: tuple[float, ...]) -> list[Command]:
        """Keep a group for a batch, or say why not and let its payload go."""
        fate: Fate = "trained"
        filtered = left_out(group, self._limits.enforced)
        if len(group.members) < MIN_SCORED:
            fate = "too_few"
        elif self._limits.drop_zero_advantage and is_flat(credit):
            fate = "zero_advantage"
        elif len(filtered) == len(group.members):
            fate = "filtered"
        closed = ClosedGroup(group, credit, fate, filtered)
        if fate == "trained":
            self._ready.append(closed)
            self._num_fruitless = 0
            self._fruitless.clear()
            return []
        if not group.cancelled:
            self._num_fruitless += 1
            self._fruitless[_why_fruitless(closed)] += 1
        return self._discard(closed)

    def _discard(self, closed: ClosedGroup) -> list[Command]:
        self._closed.append(closed)
        for member in closed.group.members:
            self._governor.release(member.scored.ref.length)
        return [Discard(Step(min(self._next_step, self._limits.max_steps)), closed)]

    def _on_published(self, event: VersionPublished) -> list[Command]:
        """The batch of that step is consumed; what is in flight may have become too old."""
        self._published = event.version
        ship = self._shipped.pop(Step(event.version))
        refs = _refs_of_batch(ship)
        for ref in refs:
            self._governor.release(ref.length)
        commands: list[Command] = [Release(refs)]
        if event.version == self._limits.max_steps:
            return commands
        oldest = event.version - self._limits.max_off_policy_steps
        reason = f"older than version {oldest}, the oldest that may still train"
        commands += [
            CancelRollout(env, id, reason) for env, id in self._groups.older_than(oldest)
        ]  # fmt: skip
        self._newest = event
        return commands + self._update()

    def _on_applied(self, version: PolicyVersion) -> list[Command]:
        self._applied = version
        self._updating = None
        return self._update()

    def _update(self) -> list[Command]:
        """One weight update at a time, always to the newest version."""
        newest = self._newest
        if newest is None or self._updating is not None or newest.version <= self._applied:
            return []
        self._updating = newest
        return [UpdateWeights(newest.version, newest.path)]

    def _ship(self) -> list[Command]:
        """Ship batches while there are enough rollouts and the trainer is not too far behind."""
        commands: list[Command] = []
        limits = self._limits
        while self._next_step <= limits.max_steps:
            commands += self._drop_stale()
            behind = self._next_step - 1 - self._published
            if behind > limits.max_off_policy_steps or self.num_ready < limits.batch_size:
                break
            commands.append(self._take_batch())
        if self._next_step > limits.max_steps and commands:
            reason = "the last batch is shipped"
            commands += [CancelRollout(env, id, reason) for env, id in self._groups.all_in_flight()]
        return commands

    def _drop_stale(self) -> list[Command]:
        oldest = self._next_step - 1 - self._limits.max_off_policy_steps
        commands: list[Command] = []
        kept: deque[ClosedGroup] = deque()
        for closed in self._ready:
            if min(member.scored.first_version for member in closed.group.members) >= oldest:
                kept.append(closed)
                continue
            commands += self._discard(msgspec.structs.replace(closed, fate="stale"))
        self._ready = kept
        return commands

    def _take_batch(self) -> Ship:
        taken: list[ClosedGroup] = []
        while sum(one.num_trained for one in taken) < self._limits.batch_size:
            taken.append(self._ready.popleft())
        manifest = plan_batch(
            self._next_step, taken, self._limits.micro_batch_tokens, self._limits.ranks
        )
        closed, self._closed = (*self._closed, *taken), []
        ship = Ship(manifest, closed)
        self._shipped[self._next_step] = ship
        self._next_step = Step(self._next_step + 1)
        return ship

    def _dispatch(self) -> list[Command]:
        """Start whole groups while every bound leaves room for one."""
        commands: list[Command] = []
        while self._has_room():
            taken = self._tasks.take(self.silent_envs, self._full_envs)
            if taken is None:
                break
            env, task, position = taken
            group_id = self._next_group
            self._next_group = GroupId(group_id + 1)
            ids = [rollout_id(group_id, member) for member in range(self._limits.group_size)]
            self._open(group_id, env, task, ids)
            commands += [Dispatch(env, group_id, id, task, self._applied, position) for id in ids]
        return commands + (list(self._tasks.pull()) if self._next_step <= self._limits.max_steps else [])

    @property
    def silent_envs(self) -> tuple[str, ...]:
        """Environments that others do not wait for."""
        return tuple(
            env for env in self._most
            if self._groups.in_flight_of(env) and self._patience.is_lost_with(env)
        )  # fmt: skip

    @property
    def _full_envs(self) -> tuple[str, ...]:
        """Environments with no room for a group: one that never answers must not take all there is."""
        size = self._limits.group_size
        return tuple(
            env for env, most in self._most.items() if self._groups.in_flight_of(env) + size > most
        )

    def _open(self, id: GroupId, env: str, task: Task, ids: list[RolloutId]) -> None:
        self._patience.began(env, was_idle=not self._groups.in_flight_of(env))
        self._groups.open(id, env, task, self._applied, ids)

    def _has_room(self) -> bool:
        limits, size = self._limits, self._limits.group_size
        lost = sum(self._groups.in_flight_of(env) for env in self.silent_envs)
        unshipped = self._groups.num_rollouts - lost + self._num_crediting() + self.num_ready
        steps_left = limits.max_steps - self._next_step + 1
        wanted = (
            self._groups.num_in_flight + size <= limits.max_in_flight
            and unshipped + self._num_training() < limits.max_outstanding
            and unshipped < steps_left * limits.batch_size
        )
        fits = self._governor.has_room(self._groups.num_in_flight + size)
        self.is_held_back = wanted and not fits
        return wanted and fits

    def _is_starved(self) -> bool:
        """Nothing runs, nothing trains, and the payload budget lets nothing start."""
        waits_for_others = (
            self._groups.num_in_flight or self._crediting or self._shipped or self._updating
        )
        full = not self._governor.has_room(self._limits.group_size)
        return not waits_for_others and full and self._next_step <= self._limits.max_steps

    def _num_crediting(self) -> int:
        return sum(len(group.members) for group in self._crediting.values())

    def _num_training(self) -> int:
        """Rollouts of batches whose weights the engine does not sample from yet."""
        return (self._next_step - 1 - self._applied) * self._limits.batch_size

    def _check(self) -> list[Command]:
        """Finish when all is trained and settled; give up instead of waiting for what cannot be."""
        waits = self._groups.num_in_flight or self._crediting
        if self._published == self._limits.max_steps and not waits:
            self.finished = True
            return [Finish()]
        reason = ""
        if env := self._tasks.empty_env:
            reason = f"environment '{env}' has no tasks"
        elif self._is_starved():
            reason = (
                f"a batch does not fit into payload.budget_mb: {self.num_ready} rollouts wait for "
                f"others with {self._governor.live_bytes} bytes, a rollout has about "
                f"{self._governor.mean_bytes:.0f}; raise it or lower orchestrator.batch_size"
            )
        elif self._num_fruitless >= self._limits.max_fruitless_groups:
            kinds = ", ".join(f"{count} × {why}" for why, count in self._fruitless.most_common(3))
            reason = f"{self._num_fruitless} groups in a row gave nothing to train on: {kinds}"
        if not reason:
            return []
        self.finished = True
        return [GiveUp(reason)]


def _most_in_flight(limits: Limits, ratios: dict[str, float]) -> dict[str, int]:
    """What may run of each environment: a slow one needs more than its share, but leaves the others a
    quarter of theirs."""
    size, whole = limits.group_size, sum(ratios.values())
    quarters = {env: limits.max_in_flight * ratio / whole / 4 for env, ratio in ratios.items()}
    reserved = {env: max(size, int(quarter) // size * size) for env, quarter in quarters.items()}
    taken = sum(reserved.values())
    return {env: max(size, limits.max_in_flight - taken + reserved[env]) for env in ratios}


def _why_fruitless(closed: ClosedGroup) -> str:
    if closed.fate == "zero_advantage":
        reward = closed.group.members[0].scored.reward
        return f"all rewards equal ({reward:g})"
    if closed.fate == "filtered":
        return "every rollout filtered"
    if closed.group.failed:
        _, failed = closed.group.failed[0]
        return f"{failed.boundary}: {failed.error}"
    return "too few scored"


def _refs_of_batch(ship: Ship) -> tuple[PayloadRef, ...]:
    """Of all members of its groups: those that were left out were kept for the record."""
    trained = [one for one in ship.closed if one.fate == "trained"]
    return tuple(member.scored.ref for one in trained for member in one.group.members)
