"""What an evaluation between the steps says. Pure.

Every task counts the same, however many of its rollouts were scored.
"""

from collections.abc import Callable, Iterable
from statistics import fmean

from ..records.group import ClosedGroup
from .statistics import pass_at, powers_of_two


def eval_metrics(
    closed: Iterable[ClosedGroup], correct_at: float, name_of: Callable[[str], str]
) -> dict[str, float]:
    """By environment, under its name; a rollout passes with a reward of `correct_at` or more."""
    by_env: dict[str, list[ClosedGroup]] = {}
    for one in closed:
        by_env.setdefault(one.group.env, []).append(one)
    return {
        f"eval/{name_of(env)}/{name}": value
        for env, groups in by_env.items()
        for name, value in _of_env(groups, correct_at).items()
    }


def _of_env(groups: list[ClosedGroup], correct_at: float) -> dict[str, float]:
    ends = [one.group for one in groups]
    total = sum(len(one.members) + len(one.failed) + len(one.cancelled) for one in ends)
    tasks = [[member.scored for member in one.members] for one in ends if one.members]
    scored = [one for task in tasks for one in task]
    found = {"failed": 1 - len(scored) / total, "tasks": float(len(tasks))}
    if not scored:
        return found
    most = max(map(len, tasks))
    rewards = [[one.reward for one in task] for task in tasks]
    return {
        f"avg@{most}": fmean(map(fmean, rewards)),
        **_passes(rewards, most, correct_at),
        "completion_len/mean": fmean(one.num_sampled or one.num_trainable for one in scored),
        "truncated": fmean(one.stop == "length" for one in scored),
        "version/min": min(one.first_version for one in scored),
        "version/max": max(one.last_version for one in scored),
        **found,
    }


def _passes(rewards: list[list[float]], most: int, correct_at: float) -> dict[str, float]:
    """Of a task with fewer than k scored rollouts nothing is said about k."""
    counts = [(len(task), sum(one >= correct_at for one in task)) for task in rewards]
    return {
        f"pass@{k}": fmean(pass_at(k, n, passed) for n, passed in counts if n >= k)
        for k in powers_of_two(most)
    }
