"""Batches: groups that wait for one, batches that the trainer has, and the weights that come back."""

from collections import deque

import msgspec

from ....config.specs import CoreSpec
from ....records.group import ClosedGroup
from ....records.ids import PolicyVersion, Step
from ....records.payload import PayloadRef
from ....records.restored import KeptPayload, RestoredBatch
from ..commands import Commands, Ship, UpdateWeights
from ..events import VersionPublished
from .staleness import is_trainer_behind, oldest_trainable


class ReadyGroups:
    """Groups that will train, in the order they closed. `batch_size` rollouts fill a batch, or
    `batch_tokens` tokens if that is set."""

    def __init__(self, batch_size: int, batch_tokens: int | None) -> None:
        self._batch_size = batch_size
        self._batch_tokens = batch_tokens
        self._groups: deque[ClosedGroup] = deque()
        self.num_rollouts = 0
        self.num_tokens = 0
        self._rollouts_seen = 0
        self._tokens_seen = 0

    @property
    def is_full(self) -> bool:
        return self._fills_batch(self.num_rollouts, self.num_tokens)

    @property
    def rollouts_a_batch(self) -> int:
        """Rollouts of one batch; with `batch_tokens`, an estimate from the mean length so far."""
        if not self._batch_tokens or not self._tokens_seen:
            return self._batch_size
        return max(1, round(self._batch_tokens * self._rollouts_seen / self._tokens_seen))

    @property
    def worth(self) -> float:
        """How much of the next batch is ready, in rollouts (of mean length, with `batch_tokens`)."""
        if not self._batch_tokens or not self.num_tokens:
            return self.num_rollouts
        return self.num_tokens * self._rollouts_seen / self._tokens_seen

    def add(self, closed: ClosedGroup) -> None:
        self._groups.append(closed)
        self._count(closed, 1)
        self._rollouts_seen += closed.num_trained
        self._tokens_seen += closed.num_tokens

    def take_batch(self) -> list[ClosedGroup]:
        batch: list[ClosedGroup] = []
        num_rollouts = num_tokens = 0
        while not self._fills_batch(num_rollouts, num_tokens):
            closed = self._groups.popleft()
            self._count(closed, -1)
            batch.append(closed)
            num_rollouts += closed.num_trained
            num_tokens += closed.num_tokens
        return batch

    def take_older_than(self, version: int) -> list[ClosedGroup]:
        """Take the groups in which a rollout began under a version before `version`."""
        stale = [closed for closed in self._groups if closed.first_version < version]
        for closed in stale:
            self._groups.remove(closed)
            self._count(closed, -1)
        return stale

    def _fills_batch(self, num_rollouts: int, num_tokens: int) -> bool:
        if self._batch_tokens:
            return num_tokens >= self._batch_tokens
        return num_rollouts >= self._batch_size

    def _count(self, closed: ClosedGroup, sign: int) -> None:
        self.num_rollouts += sign * closed.num_trained
        self.num_tokens += sign * closed.num_tokens


class Shipping:
    """Decides which groups make the next batch and when it ships, by the rule in `staleness.py`."""

    def __init__(self, spec: CoreSpec, first_step: Step) -> None:
        self._spec = spec
        self._discarded: list[ClosedGroup] = []
        self._shipped: dict[Step, tuple[ClosedGroup, ...]] = {}
        self._kept: deque[KeptPayload] = deque()
        config = spec.orchestrator
        self._max_off_policy_steps = config.max_off_policy_steps
        self.ready = ReadyGroups(config.batch_size, config.batch_tokens)
        self.next_step = first_step

    @property
    def is_over(self) -> bool:
        """Whether the last batch is shipped."""
        return self.next_step > self._spec.max_steps

    @property
    def steps_left(self) -> int:
        return self._spec.max_steps - self.next_step + 1

    @property
    def num_shipped(self) -> int:
        """Batches that the trainer has not finished."""
        return len(self._shipped)

    def restore(self, batch: RestoredBatch) -> None:
        """Take in a batch that was shipped before a restart and is trained after it."""
        step = batch.manifest.step
        self._shipped[step] = batch.closed
        self.next_step = Step(step + 1)

    def discard(self, closed: ClosedGroup) -> Step:
        """Note a group that will not train, and return the step whose batch reports it."""
        self._discarded.append(closed)
        return Step(min(self.next_step, self._spec.max_steps))

    def take_stale(self) -> list[ClosedGroup]:
        """Take the groups that became too old for the next batch while they waited."""
        oldest = oldest_trainable(self.next_step, self._max_off_policy_steps)
        stale = [] if self.is_over else self.ready.take_older_than(oldest)
        return [msgspec.structs.replace(closed, fate="stale") for closed in stale]

    def take_batch(self, published: PolicyVersion) -> Ship | None:
        """Return the next batch if it is full and the trainer is not too far behind."""
        step, spec = self.next_step, self._spec
        is_behind = is_trainer_behind(step, published, self._max_off_policy_steps)
        if self.is_over or is_behind or not self.ready.is_full:
            return None
        batch = self.ready.take_batch()
        closed, self._discarded = (*self._discarded, *batch), []
        self._shipped[step] = closed
        self.next_step = Step(step + 1)
        return Ship(step, closed, spec.micro_batch_tokens, spec.ranks)

    def published(self, version: PolicyVersion) -> list[ClosedGroup]:
        """The trainer has published a version: return the groups that it was trained on."""
        shipped = self._shipped.pop(Step(version))
        trained = [closed for closed in shipped if closed.fate == "trained"]
        self.keep(
            KeptPayload(version, tuple(ref for closed in trained for ref in closed.refs))
        )
        return trained

    def keep(self, payload: KeptPayload) -> None:
        """Keep the payload of a trained batch until `take_unneeded` is called with its version."""
        self._kept.append(payload)

    def take_unneeded(self, saved: PolicyVersion) -> tuple[PayloadRef, ...]:
        """Return the payload of the batches that a trainer which restarts from `saved` does not read."""
        refs: list[PayloadRef] = []
        while self._kept and self._kept[0].version <= saved:
            refs += self._kept.popleft().refs
        return tuple(refs)


class WeightVersions:
    """The version that is published and the one that engines sample from. One update runs at a time."""

    def __init__(self, version: PolicyVersion) -> None:
        self.published = version
        self.applied = version
        self.updating: PolicyVersion | None = None
        self._newest: VersionPublished | None = None

    def update_to(self, published: VersionPublished) -> Commands:
        """Make the engine sample from this version as soon as it can."""
        self._newest = published
        return self._update()

    def on_applied(self, version: PolicyVersion) -> Commands:
        self.applied, self.updating = version, None
        return self._update()

    def _update(self) -> Commands:
        newest = self._newest
        if newest is None or self.updating is not None or newest.version <= self.applied:
            return []
        self.updating = newest.version
        return [UpdateWeights(newest.version, newest.path)]
