"""Reports a finished step: a line of `metrics.jsonl`, and a message for the console."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from time import monotonic

import msgspec

from ...config.plan import env_name
from ...evals.statistics import eval_metrics
from ...loop.processes.part import Parent
from ...observe.health import Lags
from ...observe.report import EvalDone, Notice, StepDone
from ...observe.step_metrics import (
    lag_metrics,
    late_metrics,
    speed,
    stall_metrics,
    stall_records,
)
from ...observe.upkeep import Upkeep
from ...records.group import ClosedGroup
from ...records.ids import PolicyVersion, Step
from ...records.situation import CoreView
from ...rundir.metrics_file import MetricsFile
from ...rundir.rundir import RunDir


class StepPhases:
    """Measures how long a batch fills, is held until the trainer is near enough, and is written."""

    def __init__(self) -> None:
        self._shipped_s = monotonic()
        self._full_s: float | None = None
        self._credit_s = 0.0
        self._num_crediting = 0
        self._crediting_since_s = 0.0
        self._update_s: float | None = None
        self.verify_s: float | None = None
        """How long the last verification of an engine took."""
        self._by_step: dict[Step, dict[str, float]] = {}

    def note_full(self) -> None:
        """Note that a batch is complete, shipped or not."""
        if self._full_s is None:
            self._full_s = monotonic()

    @contextmanager
    def crediting(self) -> Iterator[None]:
        """Measure the block as time spent on advantages. Blocks that overlap count once."""
        if not self._num_crediting:
            self._crediting_since_s = monotonic()
        self._num_crediting += 1
        try:
            yield
        finally:
            self._num_crediting -= 1
            if not self._num_crediting:
                self._credit_s += monotonic() - self._crediting_since_s

    @contextmanager
    def shipping(self, step: Step) -> Iterator[None]:
        """Measure the block as time from the decision to ship to the manifest being written."""
        decided_s = monotonic()
        full_s, self._full_s = self._full_s or decided_s, None
        begun_s, self._shipped_s = self._shipped_s, decided_s
        if self._num_crediting:
            self._credit_s += decided_s - self._crediting_since_s
            self._crediting_since_s = decided_s
        credit_s, self._credit_s = self._credit_s, 0.0
        try:
            yield
        finally:
            self._by_step[step] = {
                "time/wait_rollouts": full_s - begun_s,
                "time/hold": decided_s - full_s,
                "time/credit": credit_s,
                "time/ship": monotonic() - decided_s,
            }

    @contextmanager
    def updating(self) -> Iterator[None]:
        start_s = monotonic()
        try:
            yield
        finally:
            self._update_s = monotonic() - start_s

    def take(self, step: Step) -> dict[str, float]:
        """Return the phases of a trained step, and the last weight update that ended before."""
        update_s, self._update_s = self._update_s, None
        verify_s, self.verify_s = self.verify_s, None
        times = {"time/update_weights": update_s, "time/verify": verify_s}
        known = {name: value for name, value in times.items() if value is not None}
        return {**self._by_step.pop(step, {}), **known}


MAX_UNWRITTEN = 1_000
"""Lines that are kept while `metrics.jsonl` or `evals.jsonl` cannot be written."""
LAST_TRIES, LAST_PAUSE_S = 3, 0.5
"""How often they are tried once more at the end of a run."""
SHORTEST_STEP_S = 0.001
"""Keeps rates finite if two versions arrive at once."""
SUSPICIOUS_KL, SUSPICIOUS_STEPS = 0.2, 3
BROKEN_KL = 1.0
BROKEN = (
    "Warning: the policy has changed beyond recognition in one step (KL above 1): the learning rate is "
    "probably too high for this model ('trainer.lr'), or the engine has other weights than the trainer"
)
MISMATCH = (
    "Warning: engine and trainer disagree about the same tokens (KL above 0.2, three steps in a row). "
    "Staleness rarely causes this: check that the engine really loads the weights it is given"
)


class StepLog:
    """Reports every step. A step is measured from one publication to the next."""

    def __init__(
        self,
        run: RunDir,
        parent: Parent,
        lags: Lags,
        view: Callable[[], CoreView],
        correct_at: float,
        upkeep: Upkeep,
    ) -> None:
        self._upkeep = upkeep
        self._unwritten: deque[tuple[Path, bytes]] = deque(maxlen=MAX_UNWRITTEN)
        self._run = run
        self._parent = parent
        self._lags = lags
        self._view = view
        self._correct_at = correct_at
        self._last_s = monotonic()
        self._num_suspicious = 0
        self._has_warned = False
        self.phases = StepPhases()

    async def report(
        self,
        step: Step,
        batch: Mapping[str, float],
        trained: Mapping[str, float],
        arrived_s: float,
    ) -> None:
        """Report a step that ended when its version arrived."""
        elapsed_s = max(SHORTEST_STEP_S, arrived_s - self._last_s)
        self._last_s = arrived_s
        parent = self._parent
        await parent.on_stats(parent.take_stats())  # our own lag, up to this step
        lags, stalls = self._lags.take(), self._lags.take_stalls()
        metrics = {
            **trained,
            "step": step,
            **batch,
            **speed(batch, elapsed_s),
            **gauges(self._view()),
            **{f"rss/{process}": rss for process, rss in self._lags.rss_bytes.items()},
            **stall_metrics(stalls),
            **late_metrics(self._lags.take_waits()),
            **self.phases.take(step),
        }
        rest = {"stalls": stall_records(stalls), "time": time.time()}
        line = msgspec.json.encode({**metrics, **lag_metrics(lags), **rest})
        await self._append(self._run.metrics, line)
        await parent.send(StepDone(step, metrics, lags))
        await self._warn_of_mismatch(metrics)

    async def _append(self, path: Path, line: bytes) -> None:
        """Append a line to a file, behind the lines that could not be written before."""
        self._unwritten.append((path, line))
        await self._write()

    async def _write(self) -> None:
        while self._unwritten:
            # taken out first: a call that is cancelled writes its line to the end
            path, line = self._unwritten.popleft()
            append = MetricsFile(path).append
            if not await self._upkeep.attempt(f"Writing {path.name}", append, line):
                self._unwritten.appendleft((path, line))
                return

    async def finish(self) -> None:
        """Write the lines that could not be written before, now that the run ends."""
        for _ in range(LAST_TRIES):
            await self._write()
            if not self._unwritten:
                return
            await asyncio.sleep(LAST_PAUSE_S)

    async def _warn_of_mismatch(self, metrics: Mapping[str, float]) -> None:
        kl = metrics.get("mismatch_kl", 0.0)
        if kl > BROKEN_KL and not self._has_warned:
            self._has_warned = True
            await self._parent.send(Notice(BROKEN))
        is_high = kl > SUSPICIOUS_KL
        self._num_suspicious = self._num_suspicious + 1 if is_high else 0
        if self._num_suspicious == SUSPICIOUS_STEPS:
            await self._parent.send(Notice(MISMATCH))

    async def report_eval(
        self, version: PolicyVersion, groups: tuple[ClosedGroup, ...]
    ) -> None:
        """Write a line of `evals.jsonl`, and send a message for the console."""
        metrics = eval_metrics(groups, self._correct_at, env_name)
        line = msgspec.json.encode({"step": version, **metrics, "time": time.time()})
        await self._append(self._run.evals, line)
        await self._parent.send(EvalDone(version, metrics))


def gauges(view: CoreView) -> dict[str, float]:
    return {
        **{
            f"pool/{env_name(env)}/{pool}": count
            for pool, counts in view.pools.items()
            for env, count in counts.items()
            if count
        },
        "in_flight": view.in_flight,
        "max_in_flight": view.max_in_flight,
        "retries": view.num_retries,
        "ready": view.ready,
        "payload/live_bytes": view.live_bytes,
        "payload/held_back": float(view.is_held_back),
    }
