"""Groups that will train, waiting for the rest of their batch."""

from collections import deque

from ...records.group import ClosedGroup


class Ready:
    """In the order they closed. A batch is full by rollouts; by tokens where `batch_tokens` is set."""

    def __init__(self, batch_size: int, batch_tokens: int) -> None:
        self._batch_size = batch_size
        self._batch_tokens = batch_tokens
        self._groups: deque[ClosedGroup] = deque()
        self.num_rollouts = 0
        self.num_tokens = 0
        self._rollouts_seen = 0
        self._tokens_seen = 0

    @property
    def is_full(self) -> bool:
        return self._fills(self.num_rollouts, self.num_tokens)

    @property
    def rollouts_a_batch(self) -> int:
        """As many as are asked for; with `batch_tokens`, as many as their mean length so far makes."""
        if not self._batch_tokens or not self._tokens_seen:
            return self._batch_size
        return max(1, round(self._batch_tokens * self._rollouts_seen / self._tokens_seen))

    @property
    def worth(self) -> float:
        """In rollouts; with `batch_tokens`, in rollouts of mean length."""
        if not self._batch_tokens or not self.num_tokens:
            return self.num_rollouts
        return self.num_tokens * self._rollouts_seen / self._tokens_seen

    def add(self, closed: ClosedGroup) -> None:
        self._groups.append(closed)
        self._count(closed, 1)
        self._rollouts_seen += closed.num_trained
        self._tokens_seen += closed.num_tokens

    def take_batch(self) -> list[ClosedGroup]:
        """The oldest groups that fill a batch."""
        taken: list[ClosedGroup] = []
        rollouts = tokens = 0
        while not self._fills(rollouts, tokens):
            one = self._groups.popleft()
            self._count(one, -1)
            taken.append(one)
            rollouts, tokens = rollouts + one.num_trained, tokens + one.num_tokens
        return taken

    def take_older_than(self, version: int) -> list[ClosedGroup]:
        """Groups in which a rollout began under a version before `version`."""
        stale = [one for one in self._groups if one.first_version < version]
        for one in stale:
            self._groups.remove(one)
            self._count(one, -1)
        return stale

    def _fills(self, rollouts: int, tokens: int) -> bool:
        if self._batch_tokens:
            return tokens >= self._batch_tokens
        return rollouts >= self._batch_size

    def _count(self, closed: ClosedGroup, sign: int) -> None:
        self.num_rollouts += sign * closed.num_trained
        self.num_tokens += sign * closed.num_tokens
