"""The state a resumed run finds: groups that did not train, and batches that were not finished."""

from msgspec import Struct

from .batch import BatchManifest
from .group import ClosedGroup
from .ids import GroupId, PolicyVersion, RolloutId, Step
from .payload import PayloadRef
from .rollout import Scored, Settled
from .task import Pool, Task


class RestoredGroup(Struct, frozen=True):
    """A group with the rollouts that settled and can be used. The others of `ids` run again."""

    id: GroupId
    env: str
    task: Task
    ids: tuple[RolloutId, ...]
    settled: tuple[Settled, ...]


class RestoredBatch(Struct, frozen=True):
    """A batch that was shipped, but whose weights were not published."""

    manifest: BatchManifest
    closed: tuple[ClosedGroup, ...]
    metrics: dict[str, float] = {}
    """The metrics of its step, if they were written. They include groups that did not train."""


class KeptPayload(Struct, frozen=True):
    """The payload of a trained batch. A trainer that restarts from an older version reads it again."""

    version: PolicyVersion
    """The version that training this batch made."""
    refs: tuple[PayloadRef, ...]


class RestoredTask(Struct, frozen=True):
    """A task that was not in the normal pool."""

    env: str
    task: Task
    pool: Pool


class Restored(Struct, frozen=True):
    groups: tuple[RestoredGroup, ...] = ()
    batches: tuple[RestoredBatch, ...] = ()
    cursors: dict[str, int] = {}
    next_group: GroupId = GroupId(0)
    pooled: tuple[RestoredTask, ...] = ()
    evaluated: int | None = None
    """The last version whose evaluation was complete."""
    kept: tuple[KeptPayload, ...] = ()
    """The payload of trained batches that the trainer needs to continue, in order."""

    @property
    def refs(self) -> list[PayloadRef]:
        """All payload that the resumed run reads."""
        closed = [group for batch in self.batches for group in batch.closed]
        ends = [end.outcome for group in self.groups for end in group.settled]
        scored = [end.ref for end in ends if isinstance(end, Scored)]
        untrained = scored + [ref for group in closed for ref in group.refs]
        return untrained + [ref for payload in self.kept for ref in payload.refs]


class StartPoint(Struct, frozen=True):
    """The start of a run: the model, or the point where the run ended before."""

    first_step: Step
    weights: str
    restored: Restored = Restored()
    generation: int = 0
    """How many times the run was resumed."""
