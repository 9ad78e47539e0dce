"""Batches: what waits for the next one, what the trainer has, and when the next one goes."""

from collections import deque

import msgspec

from ....records.group import ClosedGroup
from ....records.ids import PolicyVersion, Step
from ....records.restored import RestoredBatch
from ..commands import Ship, UpdateWeights
from ..events import VersionPublished
from ..limits import Limits
from .packing import plan_batch


class Shipping:
    """Step n trains version n − 1 into version n. A rollout may train at step n if its first token was
    drawn by version n − 1 − max_off_policy_steps or later."""

    def __init__(self, limits: Limits, first_step: Step) -> None:
        self._limits = limits
        self._discarded: list[ClosedGroup] = []
        self._shipped: dict[Step, Ship] = {}
        self.ready = ReadyGroups(limits.batch_size, limits.batch_tokens)
        self.next_step = first_step

    @property
    def is_over(self) -> bool:
        """The last batch is shipped."""
        return self.next_step > self._limits.max_steps

    @property
    def steps_left(self) -> int:
        return self._limits.max_steps - self.next_step + 1

    @property
    def num_shipped(self) -> int:
        """Batches the trainer has not finished."""
        return len(self._shipped)

    def restore(self, batch: RestoredBatch) -> None:
        """A batch that was shipped before a restart, and is trained after it."""
        step = batch.manifest.step
        self._shipped[step] = Ship(batch.manifest, batch.closed)
        self.next_step = Step(step + 1)

    def discard(self, closed: ClosedGroup) -> Step:
        """Note a group that will not train; the step before whose batch it closed."""
        self._discarded.append(closed)
        return Step(min(self.next_step, self._limits.max_steps))

    def take_stale(self) -> list[ClosedGroup]:
        """What became too old for the next batch while it waited."""
        oldest = self.next_step - 1 - self._limits.max_off_policy_steps
        stale = [] if self.is_over else self.ready.take_older_than(oldest)
        return [msgspec.structs.replace(one, fate="stale") for one in stale]

    def take_batch(self, published: PolicyVersion) -> Ship | None:
        """The next batch, if it is full and the trainer is not too far behind."""
        behind = self.next_step - 1 - published
        if self.is_over or behind > self._limits.max_off_policy_steps or not self.ready.is_full:
            return None
        taken = self.ready.take_batch()
        limits = self._limits
        manifest = plan_batch(self.next_step, taken, limits.micro_batch_tokens, limits.ranks)
        closed, self._discarded = (*self._discarded, *taken), []
        ship = self._shipped[self.next_step] = Ship(manifest, closed)
        self.next_step = Step(self.next_step + 1)
        return ship

    def published(self, version: PolicyVersion) -> list[ClosedGroup]:
        """The groups that made this version."""
        ship = self._shipped.pop(Step(version))
        return [one for one in ship.closed if one.fate == "trained"]


class ReadyGroups:
    """In the order they closed. A batch is full by rollouts; by tokens where `batch_tokens` is set."""

    def __init__(self, batch_size: int, batch_tokens: int) -> None:
        self._batch_size = batch_size
        self._batch_tokens = batch_tokens
        self._groups: deque[ClosedGroup] = deque()
        self.num_rollouts = 0
        self.num_tokens = 0
        self._rollouts_seen = 0
        self._tokens_seen = 0

    @property
    def is_full(self) -> bool:
        return self._fills(self.num_rollouts, self.num_tokens)

    @property
    def rollouts_a_batch(self) -> int:
        """As many as are asked for; with `batch_tokens`, as many as their mean length so far makes."""
        if not self._batch_tokens or not self._tokens_seen:
            return self._batch_size
        return max(1, round(self._batch_tokens * self._rollouts_seen / self._tokens_seen))

    @property
    def worth(self) -> float:
        """In rollouts; with `batch_tokens`, in rollouts of mean length."""
        if not self._batch_tokens or not self.num_tokens:
            return self.num_rollouts
        return self.num_tokens * self._rollouts_seen / self._tokens_seen

    def add(self, closed: ClosedGroup) -> None:
        self._groups.append(closed)
        self._count(closed, 1)
        self._rollouts_seen += closed.num_trained
        self._tokens_seen += closed.num_tokens

    def take_batch(self) -> list[ClosedGroup]:
        """The oldest groups that fill a batch."""
        taken: list[ClosedGroup] = []
        rollouts = tokens = 0
        while not self._fills(rollouts, tokens):
            one = self._groups.popleft()
            self._count(one, -1)
            taken.append(one)
            rollouts, tokens = rollouts + one.num_trained, tokens + one.num_tokens
        return taken

    def take_older_than(self, version: int) -> list[ClosedGroup]:
        """Groups in which a rollout began under a version before `version`."""
        stale = [one for one in self._groups if one.first_version < version]
        for one in stale:
            self._groups.remove(one)
            self._count(one, -1)
        return stale

    def _fills(self, rollouts: int, tokens: int) -> bool:
        if self._batch_tokens:
            return tokens >= self._batch_tokens
        return rollouts >= self._batch_size

    def _count(self, closed: ClosedGroup, sign: int) -> None:
        self.num_rollouts += sign * closed.num_trained
        self.num_tokens += sign * closed.num_tokens


class WeightVersions:
    """One update at a time, always to the newest version."""

    def __init__(self, version: PolicyVersion) -> None:
        self.published = version
        self.applied = version
        self.updating: PolicyVersion | None = None
        self._newest: VersionPublished | None = None

    def wants(self, published: VersionPublished) -> list[UpdateWeights]:
        """The engine shall sample from this version, as soon as it can."""
        self._newest = published
        return self._update()

    def on_applied(self, version: PolicyVersion) -> list[UpdateWeights]:
        self.applied = version
        self.updating = None
        return self._update()

    def _update(self) -> list[UpdateWeights]:
        newest = self._newest
        if newest is None or self.updating is not None or newest.version <= self.applied:
            return []
        self.updating = newest.version
        return [UpdateWeights(newest.version, newest.path)]
