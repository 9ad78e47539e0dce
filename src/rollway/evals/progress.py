"""The progress of an evaluation while it runs, and its last table."""

import asyncio
import time
from collections.abc import Mapping

from ..loop.watch.rarely import Rarely
from ..observe.console import Screen, lag_line, worst_lag
from ..observe.health import ProcessHealth
from .result import EvalFailure, RolloutResult, RolloutResults
from .spec import EvalSpec
from .statistics import Estimate, EvalSummary, summarise

SHOW_EVERY_S = 0.25
NUM_LINES = 10
"""The status is printed as a line this many times during an evaluation."""


class EvalProgress:
    """All results so far, those of a resumed evaluation included, and what the screen shows of them."""

    def __init__(
        self, spec: EvalSpec, previous: RolloutResults, screen: Screen, correct_at: float
    ) -> None:
        self._spec = spec
        self._screen = screen
        self._correct_at = correct_at
        self._results = {key: result for key, result in previous.items() if not result.error}
        self._num_before = len(self._results)
        self._reward_sum = sum(result.reward or 0.0 for result in self._results.values())
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
        """Start the clock: workers are up."""
        self._start_s = time.monotonic()

    @property
    def _elapsed_s(self) -> float:
        return 0.0 if self._start_s is None else time.monotonic() - self._start_s

    def on_result(self, result: RolloutResult) -> None:
        lines_before = self.num_done * NUM_LINES // self._spec.total
        if replaced := self._results.get(result.key):
            self._reward_sum -= replaced.reward or 0.0
        self._results[result.key] = result
        self._reward_sum += result.reward or 0.0
        self._num_turns += result.num_turns
        if result.error:
            self._on_failed(result.task, result.error)
        if self.num_done * NUM_LINES // self._spec.total > lines_before:
            self._screen.line(self.status())

    def _on_failed(self, task: str, failure: EvalFailure) -> None:
        """Print the failure; if a boundary fails often, only its 1st, 2nd, 4th, 8th time and so on."""
        boundary = failure.boundary
        errors = self._errors.setdefault(boundary, Rarely())
        if errors.add():
            place = f", at {failure.where}" if failure.where else ""
            self._screen.line(
                f"task '{task}' failed ({boundary} number {errors.count}): {failure.error}{place}"
            )

    def status(self) -> str:
        if self._start_s is None:
            return "starting workers"
        scored = self.num_scored
        reward = f"{self._reward_sum / scored:.3f}" if scored else "-"
        parts = [f"{self.num_done}/{self._spec.total} rollouts", f"reward {reward}"]
        if self._errors:
            counts = {boundary: errors.count for boundary, errors in self._errors.items()}
            parts.append(f"failed: {_counts(counts)}")
        parts.append(f"{self._num_turns / max(self._elapsed_s, 1e-9):.1f} turns/s")
        parts.append(worst_lag(self.health.now))
        return " · ".join(parts)

    async def show(self) -> None:
        while True:
            self._screen.status(self.status())
            await asyncio.sleep(SHOW_EVERY_S)

    def table(self) -> list[str]:
        spec = self._spec
        summary = summarise(self._results.values(), self._correct_at, spec.num_rollouts)
        settled, num_failed = summary.num_settled, sum(summary.errors.values())
        rows = _reward_rows(spec, summary)
        failed = f"{num_failed} of {settled}: {_counts(summary.errors)}"
        rows["failed"] = failed if num_failed else "none"
        before = f", without the {self._num_before} rollouts done before" * bool(
            self._num_before
        )
        rows["time"] = f"{self._elapsed_s:.1f} s{before}"
        if self.health.whole_run:
            rows["lag p99/max ms"] = lag_line(self.health.whole_run)
        width = max(len(name) for name in rows)
        counts = (
            f"{summary.num_tasks} tasks × {spec.num_rollouts} rollouts, {settled} settled"
        )
        head = f"{spec.env} · {spec.model} · {counts}"
        return [head, *(f"  {name:{width}}  {value}" for name, value in rows.items())]


def _reward_rows(spec: EvalSpec, summary: EvalSummary) -> dict[str, str]:
    if summary.reward is None:
        return {}
    return {
        "reward": _value(summary.reward),
        **{f"  {name}": _value(mean) for name, mean in summary.rewards.items()},
        **{f"  {name} (metric)": _value(mean) for name, mean in summary.metrics.items()},
        f"avg@{spec.num_rollouts}": f"{summary.reward.mean:.4f}",
        **{
            f"pass@{k}": _pass_rate(rate, summary.num_tasks)
            for k, rate in summary.pass_at.items()
        },
        "truncated": f"{summary.truncated:.1%}",
        "turns a rollout": f"{summary.turns:.2f}",
        "tokens a rollout": f"{summary.tokens:.1f}",
    }


def _value(estimate: Estimate) -> str:
    mean = f"{estimate.mean:.4f}"
    return mean if estimate.error is None else f"{mean} ± {estimate.error:.4f}"


def _pass_rate(rate: Estimate, num_tasks: int) -> str:
    """Say how many tasks count where some have too few scored rollouts."""
    value = _value(rate)
    return f"{value} ({rate.num_tasks} tasks)" if rate.num_tasks < num_tasks else value


def _counts(errors: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {boundary}" for boundary, count in errors.items())
