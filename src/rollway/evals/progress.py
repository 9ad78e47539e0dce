"""How far an evaluation is, and how its processes do, while it runs."""

import asyncio
import time
from collections.abc import Mapping

from ..loop.watch.rarely import Rarely
from ..loop.watch.stall_text import ms
from ..observe.console import Screen, lag_line
from ..observe.health import ProcessHealth
from ..records.lag import LagStats
from .result import EvalResult, ResultKey
from .spec import EvalSpec
from .statistics import Estimate, EvalSummary, summarise

SHOW_EVERY_S = 0.25
LINES = 10
"""So many times on the way its state is a line of its own."""


class EvalProgress:
    """All results, those of a resumed evaluation included, and what the screen shows of them."""

    def __init__(
        self, asked: EvalSpec, known: dict[ResultKey, EvalResult], screen: Screen, pass_at: float
    ) -> None:
        self._asked = asked
        self._screen = screen
        self._pass_at = pass_at
        self._results = {key: one for key, one in known.items() if one.error is None}
        self._rewards = sum(one.reward or 0.0 for one in self._results.values())
        self._errors: dict[str, Rarely] = {}
        self._start_s: float | None = None
        self._num_turns = 0
        self.health = ProcessHealth(screen)

    @property
    def num_done(self) -> int:
        return len(self._results)

    @property
    def num_scored(self) -> int:
        return self.num_done - sum(errors.count for errors in self._errors.values())

    def begin(self) -> None:
        """Workers are up: time counts from now."""
        self._start_s = time.monotonic()

    @property
    def _elapsed_s(self) -> float:
        return 0.0 if self._start_s is None else time.monotonic() - self._start_s

    def on_result(self, result: EvalResult) -> None:
        before = self.num_done * LINES // self._asked.total
        old = self._results.get(result.key)
        if old is not None:
            self._rewards -= old.reward or 0.0
        self._results[result.key] = result
        self._rewards += result.reward or 0.0
        self._num_turns += result.num_turns
        if result.error is not None:
            self._on_failed(result)
        if self.num_done * LINES // self._asked.total > before:
            self._screen.line(self.status())

    def _on_failed(self, result: EvalResult) -> None:
        """Said when it happens; one boundary's failures ever more seldom."""
        assert result.error is not None
        boundary = result.error.boundary
        errors = self._errors.setdefault(boundary, Rarely())
        if errors.add():
            self._screen.line(f"failed ({boundary} number {errors.count}): {result.error.error}")

    def status(self) -> str:
        if self._start_s is None:
            return "starting workers"
        reward = self._rewards / self.num_scored if self.num_scored else None
        turns_per_s = self._num_turns / max(self._elapsed_s, 1e-9)
        done, total = self.num_done, self._asked.total
        errors = {boundary: errors.count for boundary, errors in self._errors.items()}
        return status_line(done, total, reward, errors, turns_per_s, self.health.now)

    async def show(self) -> None:
        """The status line, for ever."""
        while True:
            self._screen.status(self.status())
            await asyncio.sleep(SHOW_EVERY_S)

    def summary(self) -> EvalSummary:
        return summarise(self._results.values(), self._pass_at, self._asked.num_rollouts)

    def table(self) -> list[str]:
        return table(self._asked, self.summary(), self._elapsed_s, self.health.whole_run)


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


def table(
    asked: EvalSpec, found: EvalSummary, elapsed_s: float, lags: Mapping[str, LagStats]
) -> list[str]:
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


def _rewards(asked: EvalSpec, found: EvalSummary) -> dict[str, str]:
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
