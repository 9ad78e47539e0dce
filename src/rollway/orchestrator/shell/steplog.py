"""What is told of a finished step: a line of metrics.jsonl, and a report for the console."""

import time
from collections.abc import Callable, Mapping

import msgspec

from ...config.plan import env_name
from ...loop.lanes import thread
from ...loop.part import Parent
from ...observe.evals import eval_metrics
from ...observe.lags import Lags
from ...observe.metrics import lag_metrics, speed, stall_metrics, stall_records
from ...observe.report import EvalDone, Notice, StepDone
from ...records.group import ClosedGroup
from ...records.ids import PolicyVersion, Step
from ...rundir.metricsfile import MetricsFile
from ...rundir.rundir import RunDir
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
        phases: Phases, correct_at: float,
    ) -> None:  # fmt: skip
        self._file = MetricsFile(run.metrics)
        self._evals = MetricsFile(run.evals)
        self._parent = parent
        self._lags = lags
        self._gauges = gauges
        self._phases = phases
        self._correct_at = correct_at
        self._last_s = time.monotonic()
        self._num_suspicious = 0

    async def done(self, step: Step, batch: Mapping[str, float], trained: Mapping[str, float]) -> None:
        """A step is trained: `batch` is what its batch says, `trained` what its trainer says."""
        now_s = time.monotonic()
        elapsed_s, self._last_s = now_s - self._last_s, now_s
        await self._parent.on_stats(self._parent.take_stats())  # our own lag, up to this step
        lags, stalls = self._lags.take(), self._lags.take_stalls()
        metrics = {
            **trained,
            "step": step,
            **batch,
            **speed(batch, elapsed_s),
            **self._gauges(),
            **{f"rss/{process}": rss for process, rss in self._lags.rss_bytes.items()},
            **stall_metrics(stalls),
            **self._phases.take(step),
        }
        line = msgspec.json.encode(
            {**metrics, **lag_metrics(lags), "stalls": stall_records(stalls), "time": time.time()}
        )
        await thread(self._file.append, line)
        await self._parent.say(StepDone(step, metrics, lags))
        high = metrics.get("mismatch_kl", 0.0) > SUSPICIOUS_KL
        self._num_suspicious = self._num_suspicious + 1 if high else 0
        if self._num_suspicious == SUSPICIOUS_STEPS:
            await self._parent.say(Notice(MISMATCH))

    async def evaluated(self, version: PolicyVersion, closed: tuple[ClosedGroup, ...]) -> None:
        """An evaluation is over: a line of evals.jsonl, and one for people."""
        metrics = eval_metrics(closed, self._correct_at, env_name)
        line = msgspec.json.encode({"step": version, **metrics, "time": time.time()})
        await thread(self._evals.append, line)
        await self._parent.say(EvalDone(version, metrics))
