"""How many rollouts may run at a time, from what engine and workers say of their load."""

from ....records.engine import EngineLoad

FULL_CACHE, FREE_CACHE = 0.95, 0.85
"""Above the first an engine throws out requests to make room; below the second it has some."""
LATE_S = 0.1
"""Workers whose loops are later than this have too much to do."""
LESS = 0.9


class Concurrency:
    """Starts at the most there may be. Falls by a tenth at each report of overload; rises by a group at
    each report that there is room, while it is this bound that binds. Without `adapts` it is the most,
    always."""

    def __init__(self, most: int, step: int, *, adapts: bool) -> None:
        self._most = most
        self._step = step
        self._adapts = adapts
        self._worker_lag_s = 0.0
        self.limit = most

    def worker_lag(self, lag_s: float) -> None:
        """The worst since the engine's last report."""
        self._worker_lag_s = max(self._worker_lag_s, lag_s)

    def engine_load(self, load: EngineLoad, in_flight: int) -> None:
        lag_s, self._worker_lag_s = self._worker_lag_s, 0.0
        if not self._adapts:
            return
        overloaded = load.waiting > load.running or load.cache_use > FULL_CACHE or lag_s > LATE_S
        has_room = not load.waiting and load.cache_use < FREE_CACHE and lag_s < LATE_S / 2
        if overloaded:
            self.limit = max(self._step, int(min(self.limit, in_flight) * LESS))
        elif has_room and in_flight + self._step > self.limit:
            self.limit = min(self._most, self.limit + self._step)


class PayloadBudget:
    """Counts live bytes exactly and those of rollouts in flight by the mean of what has settled."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.live_bytes = 0
        self._num_seen = 0
        self._bytes_seen = 0

    def hold(self, num_bytes: int) -> None:
        self.live_bytes += num_bytes
        self._num_seen += 1
        self._bytes_seen += num_bytes

    def release(self, num_bytes: int) -> None:
        self.live_bytes -= num_bytes

    @property
    def mean_bytes(self) -> float:
        """Of a rollout; 0 before the first has settled."""
        return self._bytes_seen / self._num_seen if self._num_seen else 0.0

    def has_room(self, num_rollouts: int) -> bool:
        """Whether so many rollouts, running or about to, will fit beside what is live."""
        return self.live_bytes + num_rollouts * self.mean_bytes <= self.budget_bytes


class StartRate:
    """Every rollout that starts takes its share of a minute; until that is over, none starts."""

    def __init__(self, a_minute: float) -> None:
        self._apart_s = 60 / a_minute
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
        return self._free_s <= (self._now_s or 0.0)
