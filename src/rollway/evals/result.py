"""A line of `results.jsonl`: how one rollout ended. The recorder adds its `messages`."""

from msgspec import Struct, field

from ..records.rollout import Cancelled, Failed, Outcome, Scored, Timing
from ..records.task import Task

ResultKey = tuple[int, int]
"""Names a rollout by the position of its task and its number among the task's rollouts."""


class EvalFailure(Struct, frozen=True, omit_defaults=True):
    boundary: str
    error: str
    traceback: str = ""
    where: str = ""


class RolloutResult(Struct, frozen=True, kw_only=True):
    """The end of a rollout. It has either a `reward` or an `error`."""

    position: int
    task: str
    rollout: int
    reward: float | None = None
    rewards: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    stop: str = ""
    num_turns: int = 0
    num_tokens: int = 0
    """The number of tokens that the policy sampled."""
    timing: Timing | None = None
    error: EvalFailure | None = None

    @property
    def key(self) -> ResultKey:
        return self.position, self.rollout


RolloutResults = dict[ResultKey, RolloutResult]


def rollout_result(key: ResultKey, task: Task, outcome: Outcome) -> RolloutResult:
    position, rollout = key
    match outcome:
        case Scored() as scored:
            return RolloutResult(
                position=position,
                task=task.id,
                rollout=rollout,
                reward=scored.reward,
                rewards=scored.rewards,
                metrics=scored.metrics,
                stop=scored.stop,
                num_turns=scored.num_turns,
                num_tokens=scored.num_sampled,
                timing=scored.timing,
            )
        case Failed(boundary=boundary, error=error, traceback=traceback, where=where):
            reason = EvalFailure(boundary, error, traceback, where)
        case Cancelled(reason=text):
            reason = EvalFailure("cancelled", text)
    return RolloutResult(position=position, task=task.id, rollout=rollout, error=reason)
