"""What the core hears."""

from msgspec import Struct

from ...records.ids import GroupId, PolicyVersion
from ...records.load import EngineLoad
from ...records.restored import Restored
from ...records.rollout import Settled
from ...records.task import Task


class TasksArrived(Struct, frozen=True):
    """Tasks of an environment from position `start`; `exhausted` when there are no more."""

    env: str
    start: int
    tasks: tuple[Task, ...]
    exhausted: bool = False


class Credited(Struct, frozen=True):
    """The advantages of a group that was asked about, in its members' order."""

    group_id: GroupId
    advantages: tuple[float, ...]


class VersionPublished(Struct, frozen=True):
    """The trainer has consumed the batch of step `version` and written its weights to `path`."""

    version: PolicyVersion
    path: str


class WeightsApplied(Struct, frozen=True):
    """The engine samples from `version` now."""

    version: PolicyVersion


class Tick(Struct, frozen=True):
    """Time passes."""

    now_s: float


class Started(Struct, frozen=True):
    """Everything is up: go, from where the run was before."""

    restored: Restored = Restored()


Event = (
    Started | Tick | TasksArrived | Settled | Credited | VersionPublished | WeightsApplied | EngineLoad
)
