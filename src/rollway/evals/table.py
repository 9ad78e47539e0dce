"""What a person sees of an evaluation: a status line, and the table at its end."""

from collections.abc import Mapping

from ..loop.telling import ms
from ..observe.console import lag_line
from ..records.lag import LagStats
from .asked import Asked
from .statistics import Estimate, Summary


def status_line(
    num_done: int, total: int, reward: float | None, errors: Mapping[str, int], turns_per_s: float,
    lags: Mapping[str, LagStats],
) -> str:  # fmt: skip
    worst = max(lags.items(), key=lambda one: one[1].max, default=("-", LagStats()))
    parts = [
        f"{num_done}/{total} rollouts",
        "reward -" if reward is None else f"reward {reward:.3f}",
        *([f"failed: {_counts(errors)}"] if errors else []),
        f"{turns_per_s:.1f} turns/s",
        f"worst lag now: {worst[0]} {ms(worst[1].max)} ms",
    ]
    return " · ".join(parts)


def table(asked: Asked, found: Summary, elapsed_s: float, lags: Mapping[str, LagStats]) -> list[str]:
    """The last lines: every mean with its standard error over tasks."""
    rows = _rewards(asked, found)
    failed = f"{found.num_failed} of {found.num_settled}: {_counts(found.errors)}"
    rows["failed"] = failed if found.num_failed else "none"
    rows["time"] = f"{elapsed_s:.1f} s"
    if lags:
        rows["lag p99/max ms"] = lag_line(lags)
    width = max(len(name) for name in rows)
    head = (
        f"{asked.env} · {asked.model} · {found.num_tasks} tasks × {asked.num_rollouts} rollouts, "
        f"{found.num_settled} settled"
    )
    return [head, *(f"  {name:{width}}  {value}" for name, value in rows.items())]


def _rewards(asked: Asked, found: Summary) -> dict[str, str]:
    if found.reward is None:
        return {}
    return {
        "reward": _value(found.reward),
        **{f"  {name}": _value(one) for name, one in found.rewards.items()},
        **{f"  {name} (metric)": _value(one) for name, one in found.metrics.items()},
        f"avg@{asked.num_rollouts}": f"{found.reward.mean:.4f}",
        **{f"pass@{k}": _pass(one, found.num_tasks) for k, one in found.pass_at.items()},
        "truncated": f"{found.truncated:.1%}",
        "turns a rollout": f"{found.turns:.2f}",
        "tokens a rollout": f"{found.tokens:.1f}",
    }


def _value(one: Estimate) -> str:
    return f"{one.mean:.4f}" + ("" if one.error is None else f" ± {one.error:.4f}")


def _pass(one: Estimate, num_tasks: int) -> str:
    """Tasks with too few scored rollouts do not count; that is said."""
    fewer = f" ({one.num_tasks} tasks)" if one.num_tasks < num_tasks else ""
    return _value(one) + fewer


def _counts(errors: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {boundary}" for boundary, count in errors.items())
