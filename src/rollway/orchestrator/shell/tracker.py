"""Keeps an eye on every rollout in flight, and says what the current step waits for."""

import heapq
import statistics
import time
from collections import deque
from collections.abc import Callable

from msgspec import Struct

from ...observe.why import first_line
from ...records.ids import GroupId, RolloutId, WorkerName
from ...records.rollout import Cancelled, Outcome
from ...records.situation import EngineState, EnvState, Situation, WaitingRollout
from ...records.task import Task
from ...wire.messages import WorkerProgress
from ..core.core import Core

MAX_OLDEST = 50
RECENT_STEPS = 10
SLOW = 4.0
"""A step that takes so many times as long as the recent ones is remarked upon …"""
SLOW_AFTER_S = 20.0
"""… if it takes at least this."""


class _Seen(Struct):
    group_id: GroupId
    env: str
    task_id: str
    since_s: float
    heard_s: float
    phase: str = "queued"
    phase_since_s: float = 0.0
    worker: WorkerName = WorkerName("")
    num_turns: int = 0
    num_tokens: int = 0


class _Env(Struct):
    num_settled: int = 0
    last_s: float = 0.0


class RolloutTracker:
    """Told what starts, moves and settles; asked for the picture."""

    def __init__(self, core: Core, engines: Callable[[], tuple[EngineState, ...]]) -> None:
        self._core = core
        self._engines = engines
        self._seen: dict[RolloutId, _Seen] = {}
        self._envs: dict[str, _Env] = {}
        self._published_s = time.monotonic()
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)
        self._remarked_s = 0.0

    def started(self, id: RolloutId, group_id: GroupId, env: str, task: Task) -> None:
        now_s = time.monotonic()
        self._envs.setdefault(env, _Env(last_s=now_s))
        self._seen[id] = _Seen(group_id, env, task.id, now_s, now_s, phase_since_s=now_s)

    def moved(self, progress: WorkerProgress) -> None:
        now_s = time.monotonic()
        for one in progress.rollouts:
            seen = self._seen.get(one.rollout_id)
            if seen is not None:
                seen.phase, seen.phase_since_s = one.phase, now_s - one.since_s
                seen.num_turns, seen.num_tokens = one.num_turns, one.num_tokens
                seen.worker, seen.heard_s = progress.worker, now_s

    def settled(self, id: RolloutId, outcome: Outcome) -> None:
        """That it was cancelled is no sign of life."""
        seen = self._seen.pop(id, None)
        if seen is not None and not isinstance(outcome, Cancelled):
            env = self._envs[seen.env]
            env.num_settled, env.last_s = env.num_settled + 1, time.monotonic()

    def published(self) -> None:
        now_s = time.monotonic()
        self._recent.append(now_s - self._published_s)
        self._published_s, self._remarked_s = now_s, 0.0

    def situation(self) -> Situation:
        now_s, core = time.monotonic(), self._core
        oldest = heapq.nsmallest(MAX_OLDEST, self._seen.items(), key=lambda one: one[1].since_s)
        in_flight: dict[str, int] = dict.fromkeys(self._envs, 0)
        for seen in self._seen.values():
            in_flight[seen.env] += 1
        return Situation(
            time_s=time.time(),
            step=core.next_step,
            waits_for=core.waits_for,
            in_flight=core.num_in_flight,
            ready=core.num_ready,
            batch_size=core.rollouts_a_batch,
            version=core.applied_version,
            step_s=now_s - self._published_s,
            envs={
                name: EnvState(in_flight[name], one.num_settled, now_s - one.last_s)
                for name, one in self._envs.items()
            },
            oldest=tuple(_held(id, seen, now_s) for id, seen in oldest),
            engines=self._engines(),
            is_finished=core.finished,
        )

    def remark(self) -> str:
        """What the step waits for, if it takes much longer than the recent ones; ever more seldom."""
        step_s = time.monotonic() - self._published_s
        usual_s = statistics.median(self._recent) if self._recent else 0.0
        due_s = max(SLOW_AFTER_S, SLOW * usual_s, 2 * self._remarked_s)
        if not self._recent or step_s < due_s:
            return ""
        self._remarked_s = step_s
        return (
            f"Step takes {step_s:.0f} s so far, {usual_s:.1f} s is usual: {first_line(self.situation())}"
        )


def _held(id: RolloutId, seen: _Seen, now_s: float) -> WaitingRollout:
    return WaitingRollout(
        rollout_id=id,
        group_id=seen.group_id,
        env=seen.env,
        task_id=seen.task_id,
        age_s=now_s - seen.since_s,
        phase=seen.phase,
        phase_s=now_s - seen.phase_since_s,
        worker=seen.worker,
        num_turns=seen.num_turns,
        num_tokens=seen.num_tokens,
        heard_s=now_s - seen.heard_s,
    )
