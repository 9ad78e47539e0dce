"""Shows on the screen what the processes of `rollway train` and `rollway serve` report."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Never

from ..loop.processes.part import Part
from ..observe.console import Screen, eval_line, lag_line, stall_line, status_line, step_line
from ..observe.health import ProcessHealth
from ..observe.prometheus import PrometheusExporter
from ..observe.report import EvalDone, Notice, RunProgress, StepDone, decode_report
from ..records.lag import ProcessStats

RELAYED = ("launcher", "engine", "trainer")
"""Processes that the orchestrator hears of through the launcher only."""
MAX_CULPRITS = 10
ENDS = 5
"""Steps at both ends of a run whose rewards its last lines compare."""
STATUS_EVERY_S = 10.0


class RunWatch:
    """Prints a run's steps as they are trained, and exports its figures."""

    def __init__(self, screen: Screen, max_steps: int, last_step: int = 0) -> None:
        """`last_step` was trained before, if the run is resumed."""
        self._screen = screen
        self._max_steps = max_steps
        self._rewards: list[float] = []
        self._orchestrator: Part | None = None
        self._relays: set[asyncio.Task[None]] = set()
        self.health = ProcessHealth(screen, self._pass_on)
        self.exporter = PrometheusExporter()
        self.last_step = last_step
        self.on_step: Callable[[], None] = lambda: None
        """Called when the line of a step is in `metrics.jsonl`."""

    def relay_to(self, orchestrator: Part) -> None:
        """Pass reports of the processes in `RELAYED` on to the orchestrator, which writes metrics."""
        self._orchestrator = orchestrator

    def say(self, text: str) -> None:
        self._screen.line(text)

    def on_message(self, body: bytes) -> None:
        match decode_report(body):
            case StepDone() as done:
                self.last_step = done.step
                self._rewards.append(done.metrics.get("reward/all/mean", 0.0))
                self.exporter.on_step(done)
                self.on_step()
                self._screen.line(step_line(done, self._max_steps))
            case EvalDone() as done:
                self.exporter.on_eval(done)
                self._screen.line(eval_line(done))
            case RunProgress(core=core):
                self.exporter.on_progress(core)
                self._screen.status(status_line(core, self._max_steps, self.health.now))
            case Notice(text=text):
                self._screen.line(text)

    def summary(self) -> list[str]:
        """Return the last lines of a run: its rewards, its lags, what held its processes longest."""
        if not self._rewards:
            return []
        return [
            self._reward_line(),
            f"Lag p99/max ms, whole run: {lag_line(self.health.whole_run)}",
            *self._culprit_lines(),
        ]

    def _reward_line(self) -> str:
        """Compare the first steps with the last, if there are enough for both."""
        rewards, count = self._rewards, ENDS
        if len(rewards) < 2 * count:
            return f"Reward: {sum(rewards) / len(rewards):.4f} (mean of {len(rewards)} steps)"
        first, last = sum(rewards[:count]) / count, sum(rewards[-count:]) / count
        return f"Reward: {first:.4f} (first {count} steps) → {last:.4f} (last {count})"

    def _culprit_lines(self) -> list[str]:
        worst = self.health.worst()
        lines = [
            f"Whole run, {stall_line(name, stall)}" for name, stall in worst[:MAX_CULPRITS]
        ]
        if len(worst) > MAX_CULPRITS:
            lines.append(f"… and {len(worst) - MAX_CULPRITS} more places, in metrics.jsonl")
        return lines

    def _pass_on(self, stats: ProcessStats) -> None:
        self.exporter.on_stats(stats)
        if self._orchestrator is not None and stats.process in RELAYED:
            task = asyncio.ensure_future(_relay(self._orchestrator, stats))
            self._relays.add(task)
            task.add_done_callback(self._relays.discard)


async def _relay(orchestrator: Part, stats: ProcessStats) -> None:
    with suppress(ConnectionError):  # it is ending, and its own listener says why
        await orchestrator.send_if_idle(stats)


class ServerWatch:
    """Prints how the router and the workers of an env server do."""

    def __init__(self, screen: Screen, router: str, num_workers: int) -> None:
        self._screen = screen
        self._router = router
        self._num_workers = num_workers
        self.health = ProcessHealth(screen)

    async def print_status(self, every_s: float) -> Never:
        """Print a line every `every_s`, about the processes that reported since the last one."""
        while True:
            await asyncio.sleep(every_s)
            self._screen.line(self.status())
            self.health.latest.clear()

    def status(self) -> str:
        reports = self.health.latest
        names = [name for name in reports if name != self._router]
        in_flight = sum(reports[name].in_flight for name in names)
        rss_bytes = sum(
            stats.rss_bytes + sum(stats.children.values()) for stats in reports.values()
        )
        return (
            f"{len(names)}/{self._num_workers} workers · {in_flight} rollouts running · "
            f"{rss_bytes / 1e6:.0f} MB · lag p99/max ms: {lag_line(self.health.now)}"
        )
