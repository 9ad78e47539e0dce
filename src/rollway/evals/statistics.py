"""pass@k: the chance that one of k rollouts of a task passes."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from math import comb, sqrt
from statistics import fmean, variance

from msgspec import Struct

from .result import EvalResult


def pass_at(k: int, num_samples: int, num_passed: int) -> float:
    """The chance that one of k samples passes, if they are drawn from these without putting back: of
    pass@k the estimate without bias."""
    return 1 - comb(num_samples - num_passed, k) / comb(num_samples, k)


def powers_of_two(limit: int) -> list[int]:
    return [1 << n for n in range(limit.bit_length()) if 1 << n <= limit]


class Estimate(Struct, frozen=True):
    """A mean over `num_tasks` tasks and its standard error; None if there is none."""

    mean: float
    error: float | None
    num_tasks: int


class EvalSummary(Struct, frozen=True):
    """An evaluation, or as much of it as there is."""

    num_tasks: int
    """With at least one rollout that was scored."""
    num_settled: int
    reward: Estimate | None
    rewards: dict[str, Estimate]
    metrics: dict[str, Estimate]
    pass_at: dict[int, Estimate]
    """By k. A task counts if at least k of its rollouts were scored."""
    truncated: float
    turns: float
    tokens: float
    errors: dict[str, int]
    """Failed rollouts by boundary."""

    @property
    def num_failed(self) -> int:
        return sum(self.errors.values())


def estimate(samples: Iterable[Sequence[float]]) -> Estimate | None:
    """The mean over tasks, given the samples of each; None if there are none at all."""
    means = [fmean(one) for one in samples if one]
    if not means:
        return None
    error = sqrt(variance(means) / len(means)) if len(means) > 1 else None
    return Estimate(fmean(means), error, len(means))


def summarise(results: Iterable[EvalResult], passing_reward: float, num_rollouts: int) -> EvalSummary:
    """All that the last table shows; a rollout passes with `passing_reward` or more."""
    settled = list(results)
    scored = [one for one in settled if one.error is None]
    by_task: dict[int, list[EvalResult]] = {}
    for one in scored:
        by_task.setdefault(one.position, []).append(one)
    tasks = list(by_task.values())
    return EvalSummary(
        num_tasks=len(tasks),
        num_settled=len(settled),
        reward=estimate([one.reward for one in task if one.reward is not None] for task in tasks),
        rewards=_by_name(tasks, lambda one: one.rewards),
        metrics=_by_name(tasks, lambda one: one.metrics),
        pass_at=_passes(tasks, passing_reward, num_rollouts),
        truncated=_mean([one.stop == "length" for one in scored]),
        turns=_mean([one.num_turns for one in scored]),
        tokens=_mean([one.num_tokens for one in scored]),
        errors=dict(Counter(one.error.boundary for one in settled if one.error).most_common()),
    )


def _passes(
    tasks: Sequence[Sequence[EvalResult]], passing_reward: float, num_rollouts: int
) -> dict[int, Estimate]:
    found: dict[int, Estimate] = {}
    counts = [
        (len(task), sum(one.reward is not None and one.reward >= passing_reward for one in task))
        for task in tasks
    ]
    for k in powers_of_two(num_rollouts):
        chances = estimate([pass_at(k, n, passed)] for n, passed in counts if n >= k)
        if chances is not None:
            found[k] = chances
    return found


def _by_name(
    tasks: Sequence[Sequence[EvalResult]], scores: Callable[[EvalResult], dict[str, float]]
) -> dict[str, Estimate]:
    """An estimate of each score, in the order they first appeared."""
    names = dict.fromkeys(name for task in tasks for one in task for name in scores(one))
    return {
        name: found
        for name in names
        if (
            found := estimate(
                [scores(one)[name] for one in task if name in scores(one)] for task in tasks
            )
        )
    }


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0
