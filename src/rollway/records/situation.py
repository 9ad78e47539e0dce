"""The state of a run and what it waits for, as one record that any process may read."""

from msgspec import Struct

from .engine import EngineLoad
from .ids import GroupId, RolloutId, WorkerName
from .task import Pool


class WaitingRollout(Struct, frozen=True):
    """A rollout that has not settled: its phase, since when, and its last reported progress."""

    rollout_id: RolloutId
    group_id: GroupId
    env: str
    task_id: str
    age_s: float
    phase: str
    phase_s: float
    worker: WorkerName | None
    num_turns: int
    num_tokens: int
    heard_s: float
    """Seconds since the last message about it."""


class EnvState(Struct, frozen=True):
    in_flight: int
    num_settled: int
    silent_s: float
    """Seconds since the last rollout settled."""
    num_failed: int = 0
    """Of those that settled."""
    commonest_failure: str = ""
    """With its count."""
    phases: dict[str, int] = {}
    """How many of its rollouts are in each phase."""


class EngineState(Struct, frozen=True):
    """One engine: the version it was given last, and how busy it is. `trouble` says why it has not
    answered for `silent_s`; it is empty while the engine answers."""

    url: str
    version: int
    silent_s: float = 0.0
    trouble: str = ""
    load: EngineLoad | None = None


class CoreView(Struct, frozen=True):
    """What the orchestrator's core knows of a run at one moment."""

    step: int
    """The step that ships next."""
    version: int
    """The version that the engines sample from."""
    waits_for: str
    """What the next step waits for, in words."""
    in_flight: int
    max_in_flight: int
    ready: int
    """Rollouts that wait for the rest of their batch."""
    batch_size: int
    live_bytes: int
    """Payload that is written and not yet trained."""
    is_held_back: bool
    """Whether the payload budget alone keeps the next group from starting."""
    num_retries: int
    pools: dict[Pool, dict[str, int]]
    """Tasks in each pool, by environment."""
    is_finished: bool = False


class Situation(Struct, frozen=True):
    """The state of a run at one moment. `oldest` are the rollouts that have been running longest."""

    time_s: float
    core: CoreView
    step_s: float
    """Seconds since the last version was published."""
    envs: dict[str, EnvState]
    oldest: tuple[WaitingRollout, ...] = ()
    engines: tuple[EngineState, ...] = ()
