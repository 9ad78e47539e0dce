"""What the core hears."""

from msgspec import Struct

from ...records.engine import EngineLoad
from ...records.ids import GroupId, PolicyVersion
from ...records.restored import Restored
from ...records.rollout import Settled
from ...records.task import Split, Task


class TasksArrived(Struct, frozen=True):
    """Tasks of an environment from position `start`; `exhausted` when there are no more."""

    env: str
    start: int
    tasks: tuple[Task, ...]
    exhausted: bool = False
    split: Split = "train"


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


class WorkerLag(Struct, frozen=True):
    """How late an env worker's loop was in nine of ten moments of the last second."""

    p90_s: float


class Tick(Struct, frozen=True):
    """Time passes."""

    now_s: float


class Started(Struct, frozen=True):
    """Everything is up: go, from where the run was before."""

    restored: Restored = Restored()
    whole_groups: frozenset[str] = frozenset()
    """Environments that run a group as one: none of its rollouts can be run again alone."""


Event = (
    Started | Tick | TasksArrived | Settled | Credited | VersionPublished | WeightsApplied | EngineLoad
    | WorkerLag
)  # fmt: skip
