"""What is told of a finished step: a line of metrics.jsonl, and a report for the console."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import msgspec

from ...config.plan import env_name
from ...evals.training import eval_metrics
from ...loop.lanes.lanes import thread
from ...loop.processes.part import Parent
from ...observe.health import Lags
from ...observe.report import EvalDone, Notice, StepDone
from ...observe.step_metrics import lag_metrics, speed, stall_metrics, stall_records
from ...records.group import ClosedGroup
from ...records.ids import PolicyVersion, Step
from ...rundir.metrics_file import MetricsFile
from ...rundir.rundir import RunDir
from ..core.core import Core


class StepPhases:
    """From one ship to the next: the batch fills, is held for the trainer, is written."""

    def __init__(self) -> None:
        self._shipped_s = time.monotonic()
        self._full_s: float | None = None
        self._credit_s = 0.0
        self._num_crediting = 0
        self._crediting_since_s = 0.0
        self._update_s: float | None = None
        self._of_step: dict[Step, dict[str, float]] = {}

    def look(self, core: Core) -> None:
        """After every event: note when a batch is complete that cannot be shipped yet."""
        if self._full_s is None and core.is_full:
            self._full_s = time.monotonic()

    @contextmanager
    def crediting(self) -> Iterator[None]:
        """While any group waits for its advantages; several at a time count once."""
        if not self._num_crediting:
            self._crediting_since_s = time.monotonic()
        self._num_crediting += 1
        yield
        self._num_crediting -= 1
        if not self._num_crediting:
            self._credit_s += time.monotonic() - self._crediting_since_s

    @contextmanager
    def shipping(self, step: Step) -> Iterator[None]:
        """From the decision to ship until the manifest is written."""
        decided_s = time.monotonic()
        full_s, self._full_s = self._full_s or decided_s, None
        begun_s, self._shipped_s = self._shipped_s, decided_s
        if self._num_crediting:
            self._credit_s += decided_s - self._crediting_since_s
            self._crediting_since_s = decided_s
        credit_s, self._credit_s = self._credit_s, 0.0
        yield
        self._of_step[step] = {
            "time/wait_rollouts": full_s - begun_s,
            "time/hold": decided_s - full_s,
            "time/credit": credit_s,
            "time/ship": time.monotonic() - decided_s,
        }

    @contextmanager
    def updating(self) -> Iterator[None]:
        start_s = time.monotonic()
        yield
        self._update_s = time.monotonic() - start_s

    def take(self, step: Step) -> dict[str, float]:
        """The phases of a step that is trained, and the last weight update that ended before."""
        update_s, self._update_s = self._update_s, None
        update = {} if update_s is None else {"time/update_weights": update_s}
        return {**self._of_step.pop(step, {}), **update}


SUSPICIOUS_KL, SUSPICIOUS_STEPS = 0.2, 3
MISMATCH = (
    "Warning: engine and trainer disagree on the same tokens (KL above 0.2, three steps in a row). "
    "Staleness seldom does this: check that the engine really loads the weights it is given"
)


class StepLog:
    """Measures steps from one publication to the next."""

    def __init__(
        self, run: RunDir, parent: Parent, lags: Lags, gauges: Callable[[], dict[str, float]],
        phases: StepPhases, correct_at: float,
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
