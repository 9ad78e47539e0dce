"""What is told of a finished step: a line of metrics.jsonl, and a report for the console."""

import time
from collections.abc import Callable

import msgspec

from ...loop.lanes import thread
from ...loop.part import Parent
from ...observe.lags import Lags
from ...observe.metrics import lag_metrics, stall_metrics, stall_records, step_metrics
from ...observe.report import Notice, StepDone
from ...rundir.rundir import RunDir
from ..core.commands import Ship
from .phases import Phases

SUSPICIOUS_KL, SUSPICIOUS_STEPS = 0.2, 3
MISMATCH = (
    "Warning: engine and trainer disagree on the same tokens (KL above 0.2, three steps in a row). "
    "Staleness seldom does this: check that the engine really loads the weights it is given"
)


class StepLog:
    """Measures steps from one publication to the next."""

    def __init__(
        self, run: RunDir, parent: Parent, lags: Lags, gauges: Callable[[], dict[str, float]],
        phases: Phases,
    ) -> None:  # fmt: skip
        self._run = run
        self._parent = parent
        self._lags = lags
        self._gauges = gauges
        self._phases = phases
        self._last_s = time.monotonic()
        self._num_suspicious = 0

    async def done(self, ship: Ship, trained: dict[str, float]) -> None:
        now_s = time.monotonic()
        elapsed_s, self._last_s = now_s - self._last_s, now_s
        lags, stalls = self._lags.take(), self._lags.take_stalls()
        metrics = {
            **trained,
            **step_metrics(ship.manifest, ship.closed, elapsed_s),
            **self._gauges(),
            **{f"rss/{process}": rss for process, rss in self._lags.rss_bytes.items()},
            **stall_metrics(stalls),
            **self._phases.take(ship.manifest.step),
        }
        line = msgspec.json.encode(
            {**metrics, **lag_metrics(lags), "stalls": stall_records(stalls), "time": time.time()}
        )
        await thread(self._append, line + b"\n")
        await self._parent.say(StepDone(ship.manifest.step, metrics, lags))
        high = metrics.get("mismatch_kl", 0.0) > SUSPICIOUS_KL
        self._num_suspicious = self._num_suspicious + 1 if high else 0
        if self._num_suspicious == SUSPICIOUS_STEPS:
            await self._parent.say(Notice(MISMATCH))

    def _append(self, line: bytes) -> None:
        with self._run.metrics.open("ab") as file:
            file.write(line)
