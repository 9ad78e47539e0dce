"""What the launcher hears from a run's processes, and what it shows of it."""

import asyncio
from collections.abc import Callable

from ..loop.processes.part import STATS_EVERY_S, Part
from ..loop.watch.lag import merge
from ..loop.watch.run import LoopWatch
from ..observe.console import Screen, eval_line, lag_line, stall_line, status_line, step_line
from ..observe.health import Complaints
from ..observe.prometheus import PrometheusExporter
from ..observe.report import EvalDone, Notice, RunProgress, StepDone, decode_report
from ..records.lag import LagStats, ProcessStats

NO_WIRE = ("launcher", "engine", "trainer")
"""Processes that the orchestrator hears of through the launcher only."""
MAX_CULPRITS = 10


class RunWatch:
    """Prints steps as they are trained, keeps the lag of every process, the culprits, the rewards."""

    def __init__(self, screen: Screen, max_steps: int) -> None:
        self._screen = screen
        self._max_steps = max_steps
        self._now: dict[str, LagStats] = {}
        self._whole_run: dict[str, LagStats] = {}
        self._complaints = Complaints(screen)
        self._rewards: list[float] = []
        self._orchestrator: Part | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.exporter = PrometheusExporter()
        self.last_step = 0
        self.on_step: Callable[[], None] = lambda: None
        """Called when a step is in `metrics.jsonl`."""

    def relay_to(self, orchestrator: Part) -> None:
        """The orchestrator writes metrics, so it hears of processes it has no wire to."""
        self._orchestrator = orchestrator

    def say(self, text: str) -> None:
        self._screen.line(text)

    async def watch_itself(self, watch: LoopWatch) -> None:
        """The launcher's own loop, for ever."""
        while True:
            await asyncio.sleep(STATS_EVERY_S)
            self.on_stats(watch.take())

    def on_stats(self, stats: ProcessStats) -> None:
        name = stats.process
        self._now[name] = stats.lag
        self._whole_run[name] = merge(self._whole_run.get(name, LagStats()), stats.lag)
        self.exporter.on_stats(stats)
        self._complaints.hear(stats)
        if self._orchestrator is not None and name in NO_WIRE:
            task = asyncio.ensure_future(_relay(self._orchestrator, stats))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def on_said(self, body: bytes) -> None:
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
                self._screen.status(status_line(core, self._max_steps, self._now))
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
            *self._worst(),
        ]

    def _worst(self) -> list[str]:
        """Who held what longest, over the whole run."""
        worst = self._complaints.worst()
        lines = [f"Whole run, {stall_line(name, one)}" for name, one in worst[:MAX_CULPRITS]]
        rest = len(worst) - MAX_CULPRITS
        return [*lines, f"… and {rest} more places, in metrics.jsonl"] if rest > 0 else lines


async def _relay(orchestrator: Part, stats: ProcessStats) -> None:
    try:
        await orchestrator.mention(stats)
    except ConnectionError:
        return  # it is ending; its own listener says so


STATUS_EVERY_S = 10.0


class ServerWatch:
    """Keeps the last word of the router and of each worker; says what held them when it happens."""

    def __init__(self, screen: Screen, num_workers: int) -> None:
        self._screen = screen
        self._num_workers = num_workers
        self._now: dict[str, ProcessStats] = {}
        self._complaints = Complaints(screen)

    def on_stats(self, stats: ProcessStats) -> None:
        self._now[stats.process] = stats
        self._complaints.hear(stats)

    async def tell(self, every_s: float) -> None:
        """One line every so often, for ever; processes that said nothing since are not in it."""
        while True:
            await asyncio.sleep(every_s)
            self._screen.line(self.status())
            self._now.clear()

    def status(self) -> str:
        workers = [one for name, one in self._now.items() if not name.endswith(".router")]
        rss_bytes = sum(one.rss_bytes for one in self._now.values())
        return (
            f"{len(workers)}/{self._num_workers} workers · "
            f"{sum(one.in_flight for one in workers)} rollouts running · {rss_bytes / 1e6:.0f} MB · "
            f"lag p99/max ms: {lag_line({name: one.lag for name, one in self._now.items()})}"
        )
