"""What the core wants done. The result of a command comes back as an event."""

from msgspec import Struct

from ...records.batch import BatchManifest
from ...records.group import ClosedGroup
from ...records.ids import GroupId, PolicyVersion, RolloutId, Step
from ...records.payload import PayloadRef
from ...records.task import Pool, Split, Task
from .batches.packing import Slices, at_once, plan_batch


class PullTasks(Struct, frozen=True):
    """Ask an environment for `count` tasks from position `start`."""

    env: str
    start: int
    count: int
    split: Split = "train"


class Dispatch(Struct, frozen=True):
    """Start rollouts of one group under `version`: all of them, or one that runs again.

    `position` is the position of the environment's next task, from which a restart continues.
    """

    env: str
    group_id: GroupId
    rollout_ids: tuple[RolloutId, ...]
    task: Task
    version: PolicyVersion
    position: int
    split: Split = "train"


class CancelRollout(Struct, frozen=True):
    """Stop a rollout; it will settle as Cancelled."""

    env: str
    rollout_id: RolloutId
    reason: str


class Credit(Struct, frozen=True):
    """Ask the advantage function of the user for a group's advantages."""

    group_id: GroupId
    rewards: tuple[float, ...]
    num_tokens: tuple[int, ...]
    num_turns: tuple[int, ...]


class Ship(Struct, frozen=True):
    """Hand a batch to the trainer. `closed` are all groups that closed since the last batch; those that
    train make up this batch."""

    step: Step
    closed: tuple[ClosedGroup, ...]
    micro_batch_tokens: int
    ranks: int

    def plan(self) -> Slices[BatchManifest]:
        trained = [closed for closed in self.closed if closed.fate == "trained"]
        return plan_batch(self.step, trained, self.micro_batch_tokens, self.ranks)

    @property
    def manifest(self) -> BatchManifest:
        """The manifest, planned without a break."""
        return at_once(self.plan())


class UpdateWeights(Struct, frozen=True):
    """Make all engines sample from `version`."""

    version: PolicyVersion
    path: str


class DiscardGroup(Struct, frozen=True):
    """Save a group that will not train, report it with `step`, and free its payload."""

    step: Step
    closed: ClosedGroup


class ReleasePayload(Struct, frozen=True):
    """Free the payload of rollouts that are trained."""

    refs: tuple[PayloadRef, ...]


class PoolTask(Struct, frozen=True):
    """Note that a task moved to a pool; None means that it is an ordinary task again."""

    env: str
    task: Task
    pool: Pool | None


class RecordEvalGroup(Struct, frozen=True):
    """Save a group of an evaluation, and free its payload."""

    version: PolicyVersion
    closed: ClosedGroup


class ReportEval(Struct, frozen=True):
    """Report an evaluation that has ended, with all its groups."""

    version: PolicyVersion
    closed: tuple[ClosedGroup, ...]


class Finish(Struct, frozen=True):
    """End the run: all steps are trained."""


class GiveUp(Struct, frozen=True):
    """End the run with an error: the next step can no longer complete."""

    reason: str


Command = (
    PullTasks | Dispatch | CancelRollout | Credit | Ship | DiscardGroup | UpdateWeights | ReleasePayload
    | PoolTask | RecordEvalGroup | ReportEval | Finish | GiveUp
)  # fmt: skip
Commands = list[Command]
