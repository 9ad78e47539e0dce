"""Statistics of evaluations. Every task counts the same, however many of its rollouts were scored. Pure.

`summarise` is for `rollway eval`, `eval_metrics` for evaluations between the steps of a run.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from math import comb, sqrt
from statistics import fmean, variance

from msgspec import Struct

from ..records.group import ClosedGroup
from .result import RolloutResult


class Estimate(Struct, frozen=True):
    """A mean over `num_tasks` tasks and its standard error, which is None for a single task."""

    mean: float
    error: float | None
    num_tasks: int


class EvalSummary(Struct, frozen=True):
    num_tasks: int
    """The number of tasks with at least one scored rollout."""
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


def pass_at(k: int, num_samples: int, num_passed: int) -> float:
    """Return the chance that one of k samples passes, drawn without replacement: an unbiased pass@k."""
    return 1 - comb(num_samples - num_passed, k) / comb(num_samples, k)


def powers_of_two(limit: int) -> list[int]:
    return [1 << n for n in range(limit.bit_length())]


def estimate(samples: Iterable[Sequence[float]]) -> Estimate | None:
    """Return the mean over tasks of each task's mean; None if no task has a sample."""
    means = [fmean(values) for values in samples if values]
    if not means:
        return None
    error = sqrt(variance(means) / len(means)) if len(means) > 1 else None
    return Estimate(fmean(means), error, len(means))


def pass_rates(
    tasks: Iterable[Sequence[float]], correct_at: float, max_k: int
) -> dict[int, Estimate]:
    """Return pass@k for k = 1, 2, 4, … up to `max_k`, of all tasks with at least k rewards."""
    passed = [[reward >= correct_at for reward in rewards] for rewards in tasks]
    rates = {}
    for k in powers_of_two(max_k):
        rate = estimate(
            [pass_at(k, len(task), sum(task))] for task in passed if len(task) >= k
        )
        if rate is not None:
            rates[k] = rate
    return rates


def summarise(
    results: Iterable[RolloutResult], correct_at: float, num_rollouts: int
) -> EvalSummary:
    settled = list(results)
    scored = [result for result in settled if result.error is None]
    errors = Counter(result.error.boundary for result in settled if result.error)
    by_task: dict[int, list[RolloutResult]] = {}
    for result in scored:
        by_task.setdefault(result.position, []).append(result)
    tasks = list(by_task.values())
    rewards = [
        [result.reward for result in task if result.reward is not None] for task in tasks
    ]
    return EvalSummary(
        num_tasks=len(tasks),
        num_settled=len(settled),
        reward=estimate(rewards),
        rewards=_by_name([[result.rewards for result in task] for task in tasks]),
        metrics=_by_name([[result.metrics for result in task] for task in tasks]),
        pass_at=pass_rates(rewards, correct_at, num_rollouts),
        truncated=_mean([result.stop == "length" for result in scored]),
        turns=_mean([result.num_turns for result in scored]),
        tokens=_mean([result.num_tokens for result in scored]),
        errors=dict(errors.most_common()),
    )


def _by_name(tasks: list[list[dict[str, float]]]) -> dict[str, Estimate]:
    """Return an estimate of each score, in the order in which the scores first appeared."""
    estimates = {}
    for name in dict.fromkeys(name for task in tasks for scores in task for name in scores):
        found = estimate(
            [scores[name] for scores in task if name in scores] for task in tasks
        )
        if found is not None:
            estimates[name] = found
    return estimates


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0


def eval_metrics(
    closed: Iterable[ClosedGroup], correct_at: float, name_of: Callable[[str], str]
) -> dict[str, float]:
    """Return the metrics of an evaluation between steps, for each environment under its name."""
    by_env: dict[str, list[ClosedGroup]] = {}
    for group in closed:
        by_env.setdefault(group.group.env, []).append(group)
    return {
        f"eval/{name_of(env)}/{name}": value
        for env, groups in by_env.items()
        for name, value in _env_metrics(groups, correct_at).items()
    }


def _env_metrics(closed: list[ClosedGroup], correct_at: float) -> dict[str, float]:
    groups = [group.group for group in closed]
    total = sum(
        len(group.members) + len(group.failed) + len(group.cancelled) for group in groups
    )
    tasks = [[member.scored for member in group.members] for group in groups if group.members]
    scored = [rollout for task in tasks for rollout in task]
    counts = {"failed": 1 - len(scored) / total, "tasks": float(len(tasks))}
    rewards = [[rollout.reward for rollout in task] for task in tasks]
    average = estimate(rewards)
    if average is None:
        return counts
    max_k = max(map(len, tasks))
    passes = pass_rates(rewards, correct_at, max_k)
    lengths = [rollout.num_sampled or rollout.num_trainable for rollout in scored]
    return {
        f"avg@{max_k}": average.mean,
        **{f"pass@{k}": rate.mean for k, rate in passes.items()},
        "completion_len/mean": fmean(lengths),
        "truncated": fmean(rollout.stop == "length" for rollout in scored),
        "version/min": min(rollout.first_version for rollout in scored),
        "version/max": max(rollout.last_version for rollout in scored),
        **counts,
    }
