"""What the core wants done. A command's result comes back as an event."""

from msgspec import Struct

from ...records.batch import BatchManifest
from ...records.group import ClosedGroup
from ...records.ids import GroupId, PolicyVersion, RolloutId, Step
from ...records.payload import PayloadRef
from ...records.task import Pool, Split, Task


class PullTasks(Struct, frozen=True):
    """Get `count` tasks of an environment from position `start`."""

    env: str
    start: int
    count: int
    split: Split = "train"


class Dispatch(Struct, frozen=True):
    """Start one rollout of `task` under `version`; `position` is that of the environment's next task."""

    env: str
    group_id: GroupId
    rollout_id: RolloutId
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
    """Ask the user's own function for a group's advantages, from what its rollouts gave and took."""

    group_id: GroupId
    rewards: tuple[float, ...]
    num_tokens: tuple[int, ...]
    num_turns: tuple[int, ...]


class Ship(Struct, frozen=True):
    """Hand a batch to the trainer; `closed` are all groups that closed since the last one."""

    manifest: BatchManifest
    closed: tuple[ClosedGroup, ...]


class UpdateWeights(Struct, frozen=True):
    """Make the engine sample from `version`."""

    version: PolicyVersion
    path: str


class DiscardGroup(Struct, frozen=True):
    """A group that closed before `step` shipped will not train: keep its record, free its payload."""

    step: Step
    closed: ClosedGroup


class ReleasePayload(Struct, frozen=True):
    """These are trained; nobody will read them any more."""

    refs: tuple[PayloadRef, ...]


class PoolTask(Struct, frozen=True):
    """A task is in this pool now; None: it is normal again."""

    env: str
    task: Task
    pool: Pool | None


class RecordEvalGroup(Struct, frozen=True):
    """All rollouts of one task of an evaluation have settled: keep its record, free its payload."""

    version: PolicyVersion
    closed: ClosedGroup


class ReportEval(Struct, frozen=True):
    """An evaluation is over: `closed` are all its groups."""

    version: PolicyVersion
    closed: tuple[ClosedGroup, ...]


class Finish(Struct, frozen=True):
    """All steps are trained."""


class GiveUp(Struct, frozen=True):
    """The next step can no longer complete."""

    reason: str


Command = (
    PullTasks | Dispatch | CancelRollout | Credit | Ship | DiscardGroup | UpdateWeights | ReleasePayload | PoolTask
    | RecordEvalGroup | ReportEval | Finish | GiveUp
)  # fmt: skip
