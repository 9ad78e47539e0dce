"""Everything around the core, under a virtual clock: slots that run rollouts, a trainer, an engine."""

import heapq
import random
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from itertools import count

from msgspec import Struct

from ..orchestrator.core.batches.credit import grpo
from ..orchestrator.core.commands import (
    CancelRollout,
    Command,
    Credit,
    DiscardGroup,
    Dispatch,
    Finish,
    GiveUp,
    PoolTask,
    PullTasks,
    RecordEvalGroup,
    ReleasePayload,
    ReportEval,
    Ship,
    UpdateWeights,
)
from ..orchestrator.core.core import Core
from ..orchestrator.core.events import (
    Credited,
    Event,
    Started,
    TasksArrived,
    Tick,
    VersionPublished,
    WeightsApplied,
)
from ..records.engine import EngineLoad
from ..records.ids import GroupId, PolicyVersion, RolloutId, WorkerName
from ..records.payload import PayloadRef
from ..records.rollout import Cancelled, Failed, Outcome, RowSummary, Scored, Settled, Timing
from ..records.task import Task
from .durations import Durations, SampledRollout

NOBODY = WorkerName("simulated")
MAX_GROUPS = 10_000
"""Groups that are remembered: more than can be open."""


class _QueuedRollout(Struct, frozen=True):
    rollout_id: RolloutId
    group_id: GroupId


class SimulationTally(Struct):
    """What happened, for the report."""

    now_s: float = 0.0
    steps_s: list[float] = []
    staleness: Counter[int] = Counter()
    num_settled: int = 0
    busy_s: float = 0.0
    """Slots in use, times seconds."""
    training_s: float = 0.0
    waits: Counter[str] = Counter()
    """Seconds by what the next step waited for."""
    most_bytes: int = 0
    most_in_flight: int = 0
    gave_up: str = ""


class SimulatedWorld:
    """Feeds the core events in the order their time comes, and obeys its commands."""

    def __init__(
        self, core: Core, durations: Durations, slots: int, seed: int, *, ticks: bool = False
    ) -> None:
        self._core = core
        self._durations = durations
        self._slots = slots
        self._ticks = ticks
        self._rng = random.Random(seed)
        self._agenda: list[tuple[float, int, Callable[[], Event | None]]] = []
        self._order = count()
        self._queue: deque[_QueuedRollout] = deque()
        self._running: set[RolloutId] = set()
        self._manifests: deque[Ship] = deque()
        self._is_training = False
        self._version = 0
        self._offset = 0
        self._groups: dict[GroupId, deque[SampledRollout]] = {}
        self._published_s = 0.0
        self.tally = SimulationTally()

    def run(self, max_settled: int) -> SimulationTally:
        """Until the core has finished, or so many rollouts have settled."""
        self._hear(Started())
        if self._ticks:
            self._tick()
        while self._agenda and not self._core.finished and self.tally.num_settled < max_settled:
            at_s, _, happens = heapq.heappop(self._agenda)
            self._pass_time(at_s)
            event = happens()
            if event is not None:
                self._hear(event)
        return self.tally

    def _pass_time(self, at_s: float) -> None:
        passed_s = at_s - self.tally.now_s
        self.tally.busy_s += passed_s * len(self._running)
        self.tally.training_s += passed_s * self._is_training
        self.tally.waits[_kind(self._core.waits_for)] += round(passed_s * 1e6)
        self.tally.now_s = at_s

    def _later(self, seconds: float, happens: Callable[[], Event | None]) -> None:
        heapq.heappush(self._agenda, (self.tally.now_s + seconds, next(self._order), happens))

    def _hear(self, event: Event) -> None:
        commands = deque(self._core.on_event(event))
        while commands:
            answer = self._obey(commands.popleft())
            if answer is not None:
                commands.extend(self._core.on_event(answer))
        self._fill_slots()
        self.tally.most_bytes = max(self.tally.most_bytes, self._core.admission.budget.live_bytes)
        self.tally.most_in_flight = max(self.tally.most_in_flight, self._core.num_in_flight)

    def _tick(self) -> Event:
        """Once a second, with what an engine would say of itself: rules that look at either need it."""
        self._later(1.0, self._tick)
        self._hear(EngineLoad(len(self._running), len(self._queue), 0.0))
        return Tick(self.tally.now_s)

    def _obey(self, command: Command) -> Event | None:
        match command:
            case PullTasks(env=env, start=start, count=wanted, split=split):
                tasks = tuple(Task(id=str(n), prompt="") for n in range(start, start + wanted))
                return TasksArrived(env, start, tasks, split=split)
            case Dispatch(rollout_ids=rollout_ids, group_id=group_id):
                self._queue.extend(_QueuedRollout(rollout_id, group_id) for rollout_id in rollout_ids)
            case CancelRollout(rollout_id=id):
                return self._cancel(id)
            case Credit(group_id=id, rewards=rewards):
                return Credited(id, grpo(rewards))
            case Ship():
                self._manifests.append(command)
                self._later(self._rng.choice(self._durations.ship_s), self._train_next)
            case UpdateWeights(version=version):
                seconds = self._rng.choice(self._durations.update_s)
                self._later(seconds, lambda: self._applied(version))
            case GiveUp(reason=reason):
                self.tally.gave_up = reason
            case (
                DiscardGroup()
                | ReleasePayload()
                | PoolTask()
                | RecordEvalGroup()
                | ReportEval()
                | Finish()
            ):
                pass
        return None

    def _fill_slots(self) -> None:
        while self._queue and len(self._running) < self._slots:
            order = self._queue.popleft()
            self._running.add(order.rollout_id)
            rolled = self._next_of(order.group_id)
            self._later(
                rolled.seconds, partial(self._end, order.rollout_id, self._version, rolled.reward)
            )

    def _end(self, rollout_id: RolloutId, version: int, reward: float) -> Event | None:
        if rollout_id not in self._running:
            return None  # it was cancelled
        self._running.remove(rollout_id)
        self.tally.num_settled += 1
        outcome: Outcome = Failed("env", "simulated")
        if self._rng.random() >= self._durations.fails:
            outcome = self._scored(version, reward)
        return Settled(rollout_id, 1, NOBODY, outcome)

    def _next_of(self, group: GroupId) -> SampledRollout:
        """Each rollout of a group takes the next of its draw; who finds none left draws anew."""
        left = self._groups.pop(group, None) or deque(self._rng.choice(self._durations.groups))
        rolled = left.popleft()
        self._groups[group] = left
        if len(self._groups) > MAX_GROUPS:
            del self._groups[next(iter(self._groups))]
        return rolled

    def _scored(self, version: int, reward: float) -> Scored:
        length = self._rng.choice(self._durations.num_bytes)
        tokens = self._rng.choice(self._durations.num_tokens)
        self._offset += length
        ref = PayloadRef("s.0-0.seg", self._offset, length)
        return Scored(
            reward, {}, {}, (RowSummary(tokens, tokens // 2),), ref, 1, "stop",
            PolicyVersion(version), PolicyVersion(self._version), Timing(0, 0, 0, 0),
        )  # fmt: skip

    def _cancel(self, id: RolloutId) -> Event | None:
        self._running.discard(id)
        self._queue = deque(one for one in self._queue if one.rollout_id != id)
        return Settled(id, 1, NOBODY, Cancelled("simulated"))

    def _train_next(self) -> Event | None:
        """One batch at a time."""
        if self._manifests and not self._is_training:
            self._is_training = True
            ship = self._manifests.popleft()
            self._later(self._rng.choice(self._durations.train_s), lambda: self._publish(ship))
        return None

    def _publish(self, ship: Ship) -> Event:
        self._is_training = False
        self.tally.steps_s.append(self.tally.now_s - self._published_s)
        self._published_s = self.tally.now_s
        for one in ship.closed:
            if one.fate == "trained":
                for member in one.group.members:
                    stale = ship.manifest.trains_version - member.scored.first_version
                    self.tally.staleness[stale] += 1
        self._train_next()
        return VersionPublished(PolicyVersion(ship.manifest.step), "")

    def _applied(self, version: PolicyVersion) -> Event:
        self._version = version
        return WeightsApplied(version)


def _kind(what: str) -> str:
    """What is waited for, without its numbers."""
    return what.partition(":")[0].partition(" to load version")[0]
