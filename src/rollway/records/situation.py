"""What a run is doing and what it waits for, as one picture that anybody may read."""

from msgspec import Struct

from .engine import EngineLoad
from .ids import GroupId, RolloutId, WorkerName


class WaitingRollout(Struct, frozen=True):
    """A rollout that is not settled: where it is, since when, and what was last heard of it."""

    rollout_id: RolloutId
    group_id: GroupId
    env: str
    task_id: str
    age_s: float
    phase: str
    phase_s: float
    worker: WorkerName
    num_turns: int
    num_tokens: int
    heard_s: float
    """Seconds since anything was heard of it."""


class EnvState(Struct, frozen=True):
    """One environment's rollouts."""

    in_flight: int
    num_settled: int
    silent_s: float
    """Seconds since one of them settled."""


class EngineState(Struct, frozen=True):
    """One engine: the version it was given last, and how busy it says it is. `trouble` is why it does
    not answer, for `silent_s` now; empty while it does."""

    url: str
    version: int
    silent_s: float = 0.0
    trouble: str = ""
    load: EngineLoad | None = None


class Situation(Struct, frozen=True):
    """A run at one moment. `oldest` are the rollouts that have been running longest."""

    time_s: float
    step: int
    waits_for: str
    in_flight: int
    ready: int
    batch_size: int
    version: int
    step_s: float
    """Since the last version was published."""
    envs: dict[str, EnvState]
    oldest: tuple[WaitingRollout, ...] = ()
    engines: tuple[EngineState, ...] = ()
    is_finished: bool = False
    """All its steps are trained."""
