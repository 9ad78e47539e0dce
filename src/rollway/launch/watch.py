"""What the launcher hears from a run's processes, and what it shows of it."""

import asyncio

from ..loop.lag import merge
from ..loop.part import Part
from ..observe.console import Screen, lag_line, stall_line, status_line, step_line
from ..observe.report import Notice, Progress, StepDone, decode_report
from ..records.lag import LagStats, ProcessStats


class RunWatch:
    """Prints steps as they are trained, keeps the lag of every process, and the rewards."""

    def __init__(self, screen: Screen, max_steps: int) -> None:
        self._screen = screen
        self._max_steps = max_steps
        self._now: dict[str, LagStats] = {}
        self._whole_run: dict[str, LagStats] = {}
        self._rewards: list[float] = []
        self._orchestrator: Part | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.last_step = 0

    def relay_to(self, orchestrator: Part) -> None:
        """The orchestrator writes metrics, so it hears of processes it has no wire to."""
        self._orchestrator = orchestrator

    def say(self, text: str) -> None:
        self._screen.line(text)

    def on_stats(self, stats: ProcessStats) -> None:
        name = stats.process
        self._now[name] = stats.lag
        old = self._whole_run.get(name)
        self._whole_run[name] = merge(old, stats.lag) if old else stats.lag
        for stall in stats.stalls:
            self._screen.line(stall_line(name, stall))
        if self._orchestrator is not None and name in ("engine", "trainer"):
            task = asyncio.ensure_future(_relay(self._orchestrator, stats))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def on_said(self, body: bytes) -> None:
        match decode_report(body):
            case StepDone() as done:
                self.last_step = done.step
                self._rewards.append(done.metrics.get("reward/all/mean", 0.0))
                self._screen.line(step_line(done, self._max_steps))
            case Progress() as progress:
                self._screen.status(status_line(progress, self._max_steps, self._now))
            case Notice(text=text):
                self._screen.line(text)

    def summary(self) -> list[str]:
        """How the run went, for its last lines."""
        if not self._rewards:
            return []
        head = self._rewards[:5]
        tail = self._rewards[-5:]
        return [
            f"Reward: {sum(head) / len(head):.4f} (first {len(head)} steps) → "
            f"{sum(tail) / len(tail):.4f} (last {len(tail)})",
            f"Lag p99/max ms, whole run: {lag_line(self._whole_run)}",
        ]


async def _relay(orchestrator: Part, stats: ProcessStats) -> None:
    try:
        await orchestrator.tell(stats)
    except ConnectionError:
        return  # it is ending; its own listener says so
