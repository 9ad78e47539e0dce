"""Whether the next group may start: every bound on how much runs at the same time.

The core asks with numbers, and the answer is yes or no. Time arrives by `tick`.
"""

from ....config.sections import OrchestratorConfig
from ....config.specs import CoreSpec
from ....records.engine import EngineLoad
from ....records.ids import RolloutId

FULL_CACHE, FREE_CACHE = 0.95, 0.85
"""Above the first an engine evicts requests to make room. Below the second it has room to spare."""
LATE_S = 0.1
"""Workers whose loops are later than this have too much to do."""
LESS = 0.9
"""An overloaded engine or worker lowers the limit to this share of what runs."""
RESERVED_SHARE = 1 / 4
"""Of its share of `max_in_flight`, every environment keeps this part free from the others."""


class Concurrency:
    """How many rollouts may run at the same time.

    The limit is `max_in_flight` unless `adapt_in_flight` is set. Then it starts at one group for each
    worker, and reports of room double it until the engine or a worker is overloaded for the first time.
    From then on a report of overload lowers it to nine tenths of what runs, and a report of room raises
    it by one group. It is raised only if it is what keeps rollouts from starting.
    """

    def __init__(self, config: OrchestratorConfig, num_workers: int) -> None:
        self._config = config
        self._worker_lag_s = 0.0
        self._is_doubling = config.adapt_in_flight
        self.limit = config.max_in_flight
        if config.adapt_in_flight:
            self.limit = min(self.limit, config.group_size * num_workers)

    def on_worker_lag(self, lag_s: float) -> None:
        """Keep the worst lag since the engine's last report."""
        self._worker_lag_s = max(self._worker_lag_s, lag_s)

    def on_engine_load(self, load: EngineLoad, in_flight: int) -> None:
        lag_s, self._worker_lag_s = self._worker_lag_s, 0.0
        if not self._config.adapt_in_flight:
            return
        size, cache_use = self._config.group_size, load.cache_use
        has_room = not load.waiting and cache_use < FREE_CACHE and lag_s < LATE_S / 2
        if load.waiting > load.running or cache_use > FULL_CACHE or lag_s > LATE_S:
            self._is_doubling = False
            self.limit = max(size, int(min(self.limit, in_flight) * LESS))
        elif has_room and in_flight + size > self.limit:
            more = self.limit if self._is_doubling else size
            self.limit = min(self._config.max_in_flight, self.limit + more)


class StartRate:
    """Spreads starts over time. Every rollout that starts takes its part of a minute, and until that
    part is over no other starts. Without a limit everything may start."""

    def __init__(self, rollouts_a_minute: float | None) -> None:
        self._apart_s = 60 / rollouts_a_minute if rollouts_a_minute else 0.0
        self._now_s: float | None = None
        self._free_s = 0.0

    def tick(self, now_s: float) -> None:
        if self._now_s is None:
            self._free_s += now_s
        self._now_s = now_s

    def started(self, count: int) -> None:
        self._free_s = max(self._free_s, self._now_s or 0.0) + count * self._apart_s

    @property
    def allows(self) -> bool:
        return not self._apart_s or self._free_s <= (self._now_s or 0.0)


class PayloadBudget:
    """Bounds live payload. It counts the bytes of settled rollouts, and those that running ones have
    brought so far. It expects all in flight to bring as many as the mean of those that have settled."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self.live_bytes = 0
        self._running: dict[RolloutId, int] = {}
        self._running_bytes = 0
        self._num_seen = 0
        self._bytes_seen = 0

    def hold(self, num_bytes: int) -> None:
        self.live_bytes += num_bytes
        self._num_seen += 1
        self._bytes_seen += num_bytes

    def grew(self, sizes: dict[RolloutId, int]) -> None:
        """Count what running rollouts have brought."""
        for rollout_id, num_bytes in sizes.items():
            self._running_bytes += num_bytes - self._running.get(rollout_id, 0)
            self._running[rollout_id] = num_bytes

    def settled(self, rollout_id: RolloutId) -> None:
        """Count a rollout among the running ones no more."""
        self._running_bytes -= self._running.pop(rollout_id, 0)

    @property
    def num_bytes(self) -> int:
        """All bytes that are written and not trained."""
        return self.live_bytes + self._running_bytes

    @property
    def mean_bytes(self) -> float:
        """The mean size of a rollout's payload; 0 before the first has settled."""
        return self._bytes_seen / self._num_seen if self._num_seen else 0.0

    def has_room(self, num_rollouts: int) -> bool:
        """Return whether this many rollouts, running or about to run, fit beside what is live."""
        expected = max(num_rollouts * self.mean_bytes, self._running_bytes)
        return self.live_bytes + expected <= self._budget_bytes


class Admission:
    def __init__(self, spec: CoreSpec) -> None:
        self._spec = spec
        self.concurrency = Concurrency(spec.orchestrator, spec.num_workers)
        self.rate = StartRate(spec.orchestrator.rollouts_a_minute)
        self.budget = PayloadBudget(spec.payload_bytes)
        self.env_limits = _env_limits(spec)
        """The most rollouts of each environment that may be in flight."""
        self.is_held_back = False
        """Whether the payload budget alone keeps the next group from starting."""
        self.has_disk = True
        """Whether there is room on the disks of the run. Without room nothing starts."""

    def allows_group(
        self,
        in_flight: int,
        unshipped: float,
        training: int,
        rollouts_a_batch: int,
        steps_left: int,
    ) -> bool:
        """`unshipped` are rollouts of groups that are open, or closed and not shipped. `training` are
        those of batches whose weights the engine does not sample from yet."""
        config = self._spec.orchestrator
        most_outstanding = self._spec.max_outstanding * rollouts_a_batch / config.batch_size
        is_wanted = (
            in_flight + config.group_size <= self.concurrency.limit
            and unshipped + training < most_outstanding
            and unshipped < steps_left * rollouts_a_batch
            and self.rate.allows
            and self.has_disk
        )
        fits = self.budget.has_room(in_flight + config.group_size)
        self.is_held_back = is_wanted and not fits
        return is_wanted and fits


def _env_limits(spec: CoreSpec) -> dict[str, int]:
    """Return the most rollouts of each environment that may be in flight. A slow environment may use
    more than its share, but every environment reserves a quarter of its share: one that never answers
    must not take everything."""
    size, most = spec.orchestrator.group_size, spec.orchestrator.max_in_flight
    total = sum(spec.ratios.values())
    reserved = {
        env: max(size, int(most * ratio / total * RESERVED_SHARE) // size * size)
        for env, ratio in spec.ratios.items()
    }
    free = most - sum(reserved.values())
    return {env: max(size, free + reserved[env]) for env in spec.ratios}
