"""Bounds live payload: what is written and not yet released, and what is on its way."""


class ByteGovernor:
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
