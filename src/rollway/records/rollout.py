"""A rollout's end: exactly one of Scored, Failed and Cancelled."""

from typing import Literal

from msgspec import Struct

from .ids import PolicyVersion, RolloutId, WorkerName
from .payload import PayloadRef

Boundary = Literal["env", "engine", "scorer", "deadline", "worker"]


Detection = Literal["gibberish", "repetition"]
"""A sign that a row's text has gone wrong."""


class RowSummary(Struct, frozen=True):
    """What the orchestrator knows of a row: sizes and signs, never tokens."""

    num_tokens: int
    num_trainable: int
    detected: tuple[Detection, ...] = ()


class Timing(Struct, frozen=True):
    """Seconds a rollout spent, by phase. Each is measured by one clock of one process."""

    engine_s: float
    """In requests; those of children that ran side by side are added up."""
    env_s: float
    scoring_s: float
    total_s: float
    """In its worker, from its start to its last reward."""
    queue_s: float = 0.0
    """In the env server before that, lost attempts included."""


class Scored(Struct, frozen=True, tag="scored"):
    """The rollout ended, its rewards are known and its columns are written.

    Without rows it came from an engine that speaks messages only: there is nothing to train.
    """

    reward: float
    rewards: dict[str, float]
    metrics: dict[str, float]
    rows: tuple[RowSummary, ...]
    ref: PayloadRef
    num_turns: int
    stop: str
    first_version: PolicyVersion
    last_version: PolicyVersion
    timing: Timing
    num_sampled: int = 0
    """Tokens the policy drew; where there are no rows, as many as its endpoint says."""

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)

    @property
    def num_trainable(self) -> int:
        return sum(row.num_trainable for row in self.rows)


class Failed(Struct, frozen=True, tag="failed"):
    """The rollout could not be completed; `boundary` says whose failure it is."""

    boundary: Boundary
    error: str
    traceback: str = ""


class Cancelled(Struct, frozen=True, tag="cancelled"):
    """Nobody needs the rollout any more."""

    reason: str


Outcome = Scored | Failed | Cancelled


class Settled(Struct, frozen=True, tag="settled"):
    """A rollout reached its end. Sent once per rollout; `attempt` counts lost workers from 1."""

    rollout_id: RolloutId
    attempt: int
    worker: WorkerName
    outcome: Outcome
