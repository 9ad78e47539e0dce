"""What happens to the core. Every input of a decision, time included, arrives in an event."""

from msgspec import Struct

from ...records.engine import EngineLoad
from ...records.ids import GroupId, PolicyVersion, RolloutId
from ...records.restored import Restored
from ...records.rollout import Settled
from ...records.task import Split, Task


class TasksArrived(Struct, frozen=True):
    """An environment sent tasks from position `start`; `exhausted` if there are no more."""

    env: str
    start: int
    tasks: tuple[Task, ...]
    exhausted: bool = False
    split: Split = "train"


class Credited(Struct, frozen=True):
    """The user's function returned the advantages of a group, in the order of its members."""

    group_id: GroupId
    advantages: tuple[float, ...]


class VersionPublished(Struct, frozen=True):
    """The trainer has trained the batch of step `version` and written its weights to `path`."""

    version: PolicyVersion
    path: str
    saved: PolicyVersion | None = None
    """The newest version that the trainer can restart from, if it needs the batches after it again."""


class WeightsApplied(Struct, frozen=True):
    """The engines sample from `version` now."""

    version: PolicyVersion


class WorkerLag(Struct, frozen=True):
    """The 90th percentile of a worker's loop lag over the last second."""

    p90_s: float


class PayloadGrew(Struct, frozen=True):
    """How many bytes some running rollouts have brought so far."""

    sizes: dict[RolloutId, int]


class Tick(Struct, frozen=True):
    now_s: float
    has_room: bool = True
    """Whether the disks of the run have room."""


class Started(Struct, frozen=True):
    """Every process is up. The run starts from `restored`, which is empty for a new run."""

    restored: Restored = Restored()
    whole_groups: frozenset[str] = frozenset()
    """Environments that need all rollouts of a group in one worker. A failed rollout of theirs cannot
    run again alone."""


Event = (
    Started
    | Tick
    | TasksArrived
    | Settled
    | Credited
    | VersionPublished
    | WeightsApplied
    | EngineLoad
    | WorkerLag
    | PayloadGrew
)
