"""Batches: what waits for the next one, what the trainer has, and when the next one goes."""

import msgspec

from ...records.group import ClosedGroup
from ...records.ids import PolicyVersion, Step
from ...records.restored import RestoredBatch
from ..batching.manifest import plan_batch
from .commands import Ship
from .limits import Limits
from .ready import Ready


class Shipping:
    """Step n trains version n − 1 into version n. A rollout may train at step n if its first token was
    drawn by version n − 1 − max_off_policy_steps or later."""

    def __init__(self, limits: Limits, first_step: Step) -> None:
        self._limits = limits
        self._discarded: list[ClosedGroup] = []
        self._shipped: dict[Step, Ship] = {}
        self.ready = Ready(limits.batch_size, limits.batch_tokens)
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
