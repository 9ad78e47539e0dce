"""Everything around the core under a virtual clock: slots that run rollouts, a trainer, an engine."""

import heapq
import random
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from itertools import count

from msgspec import Struct, field

from ..orchestrator.core import commands
from ..orchestrator.core.batches.credit import grpo
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
from ..orchestrator.core.state import bound_of, waits_for
from ..records.engine import EngineLoad
from ..records.ids import GroupId, PolicyVersion, RolloutId, WorkerName
from ..records.payload import PayloadRef
from ..records.rollout import Cancelled, Failed, Outcome, RowSummary, Scored, Settled, Timing
from ..records.task import Task
from .durations import Durations, SampledRollout

Action = Callable[[], Event | None]
SIMULATED = WorkerName("simulated")
SLOTS = "slots"
"""All slots run a rollout, and others wait for one."""
MAX_GROUPS = 10_000
"""Groups whose draws are kept: more than can be open at a time."""


class SimulationTally(Struct):
    now_s: float = 0.0
    steps_s: list[float] = []
    staleness: Counter[int] = field(default_factory=Counter)
    """Trained rollouts by their staleness."""
    num_settled: int = 0
    busy_s: float = 0.0
    """The sum over all slots of the seconds in which they were in use."""
    training_s: float = 0.0
    waits_us: Counter[str] = field(default_factory=Counter)
    """Microseconds by what the next step waited for: the trainer while it trains, else what the core
    says."""
    binds_us: Counter[str] = field(default_factory=Counter)
    """Microseconds by what kept more rollouts from running."""
    most_bytes: int = 0
    most_in_flight: int = 0
    gave_up: str = ""


class SimulatedWorld:
    """Gives the core events in the order of their time, and carries out its commands."""

    def __init__(
        self, core: Core, durations: Durations, slots: int, seed: int, *, ticks: bool = False
    ) -> None:
        self._core = core
        self._durations = durations
        self._slots = slots
        self._ticks = ticks
        self._rng = random.Random(seed)
        self._choose = self._rng.choice
        self._agenda: list[tuple[float, int, Action]] = []
        self._order = count()
        self._queue: deque[tuple[RolloutId, GroupId]] = deque()
        self._running: set[RolloutId] = set()
        self._batches: deque[commands.Ship] = deque()
        self._is_training = False
        self._version = 0
        self._offset = 0
        self._groups: dict[GroupId, deque[SampledRollout]] = {}
        self._published_s = 0.0
        self.tally = SimulationTally()

    def run(self, max_settled: int) -> SimulationTally:
        """Run until the core has finished or `max_settled` rollouts have settled."""
        self._hear(Started())
        if self._ticks:
            self._tick()
        agenda, core, tally = self._agenda, self._core, self.tally
        while agenda and not core.finished and tally.num_settled < max_settled:
            at_s, _, action = heapq.heappop(agenda)
            self._pass_time(at_s)
            event = action()
            if event is not None:
                self._hear(event)
        return self.tally

    def _pass_time(self, at_s: float) -> None:
        tally = self.tally
        passed_s = at_s - tally.now_s
        tally.busy_s += passed_s * len(self._running)
        tally.training_s += passed_s * self._is_training
        passed_us = round(passed_s * 1e6)
        cause = "the trainer" if self._is_training else _cause(waits_for(self._core))
        tally.waits_us[cause] += passed_us
        tally.binds_us[self._bound()] += passed_us
        tally.now_s = at_s

    def _bound(self) -> str:
        """Name what keeps more rollouts from running right now."""
        if self._queue:
            return SLOTS
        return bound_of(self._core) or "nothing"

    def _later(self, seconds: float, action: Action) -> None:
        at_s = self.tally.now_s + seconds
        heapq.heappush(self._agenda, (at_s, next(self._order), action))

    def _hear(self, event: Event) -> None:
        orders = deque(self._core.on_event(event))
        while orders:
            result = self._perform(orders.popleft())
            if result is not None:
                orders.extend(self._core.on_event(result))
        self._fill_slots()
        tally, budget = self.tally, self._core.admission.budget
        tally.most_bytes = max(tally.most_bytes, budget.live_bytes)
        tally.most_in_flight = max(tally.most_in_flight, self._core.num_in_flight)

    def _tick(self) -> Event:
        """Tick once a second and report the engine's load: some rules of the core need both."""
        self._later(1.0, self._tick)
        self._hear(EngineLoad(len(self._running), len(self._queue), 0.0))
        return Tick(self.tally.now_s)

    def _perform(self, command: commands.Command) -> Event | None:
        """Carry out a command. Those that write or free something have no effect here."""
        match command:
            case commands.PullTasks(env=env, start=start, count=num_tasks, split=split):
                positions = range(start, start + num_tasks)
                tasks = tuple(Task(str(position), "") for position in positions)
                return TasksArrived(env, start, tasks, split=split)
            case commands.Dispatch(rollout_ids=rollout_ids, group_id=group_id):
                self._queue.extend((name, group_id) for name in rollout_ids)
            case commands.CancelRollout(rollout_id=rollout_id):
                return self._cancel(rollout_id)
            case commands.Credit(group_id=group_id, rewards=rewards):
                return Credited(group_id, grpo(rewards))
            case commands.Ship():
                self._batches.append(command)
                self._later(self._choose(self._durations.ship_s), self._train_next)
            case commands.UpdateWeights(version=version):
                seconds = self._choose(self._durations.update_s)
                self._later(seconds, lambda: self._applied(version))
            case commands.GiveUp(reason=reason):
                self.tally.gave_up = reason
        return None

    def _fill_slots(self) -> None:
        while self._queue and len(self._running) < self._slots:
            rollout_id, group_id = self._queue.popleft()
            self._running.add(rollout_id)
            sampled = self._draw(group_id)
            end = partial(self._end, rollout_id, self._version, sampled.reward)
            self._later(sampled.seconds, end)

    def _end(self, rollout_id: RolloutId, version: int, reward: float) -> Event | None:
        if rollout_id not in self._running:
            return None  # it was cancelled
        self._running.remove(rollout_id)
        self.tally.num_settled += 1
        outcome: Outcome = Failed("env", "simulated")
        if self._rng.random() >= self._durations.fails:
            outcome = self._scored(version, reward)
        return Settled(rollout_id, 1, SIMULATED, outcome)

    def _draw(self, group_id: GroupId) -> SampledRollout:
        """Return the next rollout of the group's draw; draw another group when none is left."""
        left = self._groups.pop(group_id, None) or deque(self._choose(self._durations.groups))
        sampled = left.popleft()
        self._groups[group_id] = left
        if len(self._groups) > MAX_GROUPS:
            del self._groups[next(iter(self._groups))]
        return sampled

    def _scored(self, version: int, reward: float) -> Scored:
        length = self._choose(self._durations.num_bytes)
        tokens = self._choose(self._durations.num_tokens)
        self._offset += length
        ref = PayloadRef("s.0-0.seg", self._offset, length)
        row = RowSummary(tokens, tokens // 2)
        first, last = PolicyVersion(version), PolicyVersion(self._version)
        return Scored(reward, {}, {}, (row,), ref, 1, "stop", first, last, Timing(0, 0, 0, 0))

    def _cancel(self, rollout_id: RolloutId) -> Event:
        self._running.discard(rollout_id)
        self._queue = deque(queued for queued in self._queue if queued[0] != rollout_id)
        return Settled(rollout_id, 1, SIMULATED, Cancelled("simulated"))

    def _train_next(self) -> Event | None:
        """Train the next batch, unless one is being trained."""
        if self._batches and not self._is_training:
            self._is_training = True
            ship = self._batches.popleft()
            self._later(self._choose(self._durations.train_s), lambda: self._publish(ship))
        return None

    def _publish(self, ship: commands.Ship) -> Event:
        self._is_training = False
        tally = self.tally
        tally.steps_s.append(tally.now_s - self._published_s)
        self._published_s = tally.now_s
        for closed in ship.closed:
            if closed.fate == "trained":
                for member in closed.group.members:
                    stale = ship.step - 1 - member.scored.first_version
                    tally.staleness[stale] += 1
        self._train_next()
        return VersionPublished(PolicyVersion(ship.step), "")

    def _applied(self, version: PolicyVersion) -> Event:
        self._version = version
        return WeightsApplied(version)


def _cause(text: str) -> str:
    """Return what the core waits for, without numbers."""
    return text.partition(":")[0].partition(" to load version")[0]
