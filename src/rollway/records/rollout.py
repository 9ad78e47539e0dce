"""The end of a rollout: exactly one of Scored, Failed and Cancelled."""

import re
from typing import Literal

from msgspec import Struct

from .ids import PolicyVersion, RolloutId, WorkerName
from .payload import PayloadRef
from .text import one_line

Boundary = Literal["env", "engine", "scorer", "deadline", "worker"]
Detection = Literal["gibberish", "repetition"]
"""A sign that the text of a row has gone wrong."""


class RowSummary(Struct, frozen=True):
    """A row as the orchestrator knows it: its sizes and signs of broken text, without tokens."""

    num_tokens: int
    num_trainable: int
    detected: tuple[Detection, ...] = ()
    engine: str = ""
    """The address of the engine that drew its tokens. Empty if there were several."""
    version: PolicyVersion | None = None
    """The version that drew its tokens, if it was a single one."""
    is_approximate: bool = False
    """A turn of it came without token ids or logprobs, so its ids are not for certain those that were
    drawn, and its logprobs are not known."""


class Timing(Struct, frozen=True):
    """The seconds a rollout spent in each phase. Each is measured by one clock of one process."""

    engine_s: float
    """Time in requests to engines. The requests of children that ran at the same time are added up."""
    env_s: float
    scoring_s: float
    total_s: float
    """Time in the worker, from the start of the rollout to its last reward."""
    queue_s: float = 0.0
    """Time in the env server before that, including lost attempts."""


class Scored(Struct, frozen=True, tag="scored"):
    """The rollout has ended, its rewards are known and its columns are written. A rollout of a chat
    endpoint, which returns text but no token ids, has no rows and cannot be trained."""

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
    """The tokens that the policy sampled. Without rows, the number that the chat endpoint reports."""
    engines: tuple[str, ...] = ()
    """The addresses of the engines that drew its tokens."""

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)

    @property
    def num_trainable(self) -> int:
        return sum(row.num_trainable for row in self.rows)


_VARYING = re.compile(r"'[^']*'|\d+")
"""What differs between failures of one cause: names in quotes, and numbers."""


class Failed(Struct, frozen=True, tag="failed"):
    """The rollout could not be completed. `boundary` says where the failure belongs."""

    boundary: Boundary
    error: str
    """What went wrong, without the name of the task, so that failures can be summed up."""
    traceback: str = ""
    where: str = ""
    """The user's line that raised, or that was running: `file:line in function`."""

    @property
    def kind(self) -> str:
        """What failures of one cause have in common: their line, or their text without its numbers."""
        return f"{self.boundary} {self.where or _VARYING.sub('…', self.error)}"

    @property
    def text(self) -> str:
        """The failure in one line, for people."""
        return one_line(
            f"{self.boundary}: {self.error}{f', at {self.where}' * bool(self.where)}"
        )


class Cancelled(Struct, frozen=True, tag="cancelled"):
    """The rollout was no longer needed."""

    reason: str


Outcome = Scored | Failed | Cancelled


class Settled(Struct, frozen=True, tag="settled"):
    """A rollout has reached its end. Sent once per rollout; `attempt` is 1 plus the lost workers."""

    rollout_id: RolloutId
    attempt: int
    worker: WorkerName
    outcome: Outcome
