"""A line of `results.jsonl`: one rollout's end."""

from msgspec import Raw, Struct, field

from ..records.rollout import Cancelled, Failed, Outcome, Scored, Timing
from ..records.task import Task

ResultKey = tuple[int, int]
"""A rollout: its task's position, and which of the task's rollouts it is."""


class ResultError(Struct, frozen=True, omit_defaults=True):
    """Why a rollout has no reward."""

    boundary: str
    error: str
    traceback: str = ""


class EvalResult(Struct, frozen=True, kw_only=True):
    """What a rollout was worth, or why that is not known: `reward` and `error` exclude each other."""

    position: int
    task: str
    rollout: int
    reward: float | None = None
    rewards: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    stop: str = ""
    num_turns: int = 0
    num_tokens: int = 0
    """Drawn by the policy."""
    timing: Timing | None = None
    error: ResultError | None = None

    @property
    def key(self) -> ResultKey:
        return self.position, self.rollout


class TranscriptLine(Struct, frozen=True):
    """The rest of a line: the conversation, as JSON that nobody has parsed."""

    messages: Raw


def result_of(key: ResultKey, task: Task, outcome: Outcome) -> EvalResult:
    position, rollout = key
    match outcome:
        case Scored() as scored:
            return EvalResult(
                position=position, task=task.id, rollout=rollout, reward=scored.reward,
                rewards=scored.rewards, metrics=scored.metrics, stop=scored.stop,
                num_turns=scored.num_turns, num_tokens=scored.num_sampled, timing=scored.timing,
            )  # fmt: skip
        case Failed(boundary=boundary, error=error, traceback=traceback):
            problem = ResultError(boundary, error, traceback)
        case Cancelled(reason=reason):
            problem = ResultError("cancelled", reason)
    return EvalResult(position=position, task=task.id, rollout=rollout, error=problem)
