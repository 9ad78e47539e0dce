"""Tracks every rollout in flight, and says what the current step waits for."""

import heapq
import statistics
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable
from time import monotonic

from msgspec import Struct

from ...config.plan import env_name
from ...observe.why import first_line
from ...records.ids import GroupId, RolloutId, WorkerName
from ...records.rollout import Cancelled, Failed, Outcome
from ...records.situation import CoreView, EngineState, EnvState, Situation, WaitingRollout
from ...records.task import Task
from ...wire.messages import RolloutPhases
from .failure_counts import FailureCounts

MAX_OLDEST = 50
RECENT_STEPS = 10
SLOW_FACTOR, SLOW_AFTER_S = 4.0, 20.0
"""A step is slow if it takes this many times as long as the recent ones, and at least this long."""


class _InFlight(Struct):
    group_id: GroupId
    env: str
    task_id: str
    since_s: float
    heard_s: float
    phase: str = "queued"
    phase_since_s: float = 0.0
    worker: WorkerName | None = None
    num_turns: int = 0
    num_tokens: int = 0


class _EnvCount(Struct):
    num_settled: int = 0
    last_s: float = 0.0


class RolloutTracker:
    """Hears what starts, progresses and settles. `situation` returns the whole picture."""

    def __init__(
        self, view: Callable[[], CoreView], engines: Callable[[], tuple[EngineState, ...]]
    ) -> None:
        self._view = view
        self._engines = engines
        self._in_flight: dict[RolloutId, _InFlight] = {}
        self._envs: dict[str, _EnvCount] = {}
        self._published_s = monotonic()
        self._recent_s: deque[float] = deque(maxlen=RECENT_STEPS)
        self._remarked_s = 0.0
        self.failures = FailureCounts()

    def task_of(self, rollout_id: RolloutId) -> str:
        """Return the id of a running rollout's task; empty if the rollout is not known."""
        rollout = self._in_flight.get(rollout_id)
        return rollout.task_id if rollout else ""

    def started(self, rollout_id: RolloutId, group_id: GroupId, env: str, task: Task) -> None:
        now_s = monotonic()
        env = env_name(env)
        self._envs.setdefault(env, _EnvCount(last_s=now_s))
        self._in_flight[rollout_id] = _InFlight(
            group_id, env, task.id, now_s, now_s, phase_since_s=now_s
        )

    def unsettled(self) -> Iterable[RolloutId]:
        return self._in_flight

    def progressed(self, progress: RolloutPhases) -> None:
        now_s = monotonic()
        for report in progress.rollouts:
            rollout = self._in_flight.get(report.rollout_id)
            if rollout is not None:
                rollout.phase, rollout.phase_since_s = report.phase, now_s - report.since_s
                rollout.num_turns, rollout.num_tokens = report.num_turns, report.num_tokens
                rollout.worker, rollout.heard_s = progress.worker, now_s

    def settled(self, rollout_id: RolloutId, outcome: Outcome) -> None:
        """Forget a rollout. A cancelled one does not count as a sign of life of its environment."""
        rollout = self._in_flight.pop(rollout_id, None)
        if rollout is not None and not isinstance(outcome, Cancelled):
            env = self._envs[rollout.env]
            env.num_settled, env.last_s = env.num_settled + 1, monotonic()
        if rollout is not None and isinstance(outcome, Failed):
            self.failures.add(rollout.env, outcome)

    def published(self) -> None:
        now_s = monotonic()
        self._recent_s.append(now_s - self._published_s)
        self._published_s, self._remarked_s = now_s, 0.0

    def situation(self) -> Situation:
        now_s = monotonic()
        rollouts = self._in_flight.items()
        by_age = heapq.nsmallest(MAX_OLDEST, rollouts, key=lambda item: item[1].since_s)
        phases: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for _, rollout in rollouts:
            phases[rollout.env][rollout.phase] += 1
        return Situation(
            time_s=time.time(),
            core=self._view(),
            step_s=now_s - self._published_s,
            envs={
                name: EnvState(
                    in_flight=phases[name].total(),
                    num_settled=env.num_settled,
                    silent_s=now_s - env.last_s,
                    num_failed=self.failures.total(name),
                    commonest_failure=self.failures.commonest(name),
                    phases=dict(phases[name].most_common()),
                )
                for name, env in self._envs.items()
            },
            oldest=tuple(
                _waiting(rollout_id, rollout, now_s) for rollout_id, rollout in by_age
            ),
            engines=self._engines(),
        )

    def remark(self) -> str:
        """Return what a slow step waits for, else an empty text. The next remark on the same step
        comes after twice the time."""
        step_s = monotonic() - self._published_s
        usual_s = statistics.median(self._recent_s) if self._recent_s else 0.0
        due_s = max(SLOW_AFTER_S, SLOW_FACTOR * usual_s, 2 * self._remarked_s)
        if not self._recent_s or step_s < due_s:
            return ""
        self._remarked_s = step_s
        reason = first_line(self.situation())
        return f"The step has taken {step_s:.0f} s so far, {usual_s:.1f} s is usual: {reason}"


def _waiting(rollout_id: RolloutId, rollout: _InFlight, now_s: float) -> WaitingRollout:
    return WaitingRollout(
        rollout_id=rollout_id,
        group_id=rollout.group_id,
        env=rollout.env,
        task_id=rollout.task_id,
        age_s=now_s - rollout.since_s,
        phase=rollout.phase,
        phase_s=now_s - rollout.phase_since_s,
        worker=rollout.worker,
        num_turns=rollout.num_turns,
        num_tokens=rollout.num_tokens,
        heard_s=now_s - rollout.heard_s,
    )
