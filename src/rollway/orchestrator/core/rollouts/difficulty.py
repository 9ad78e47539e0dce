"""Tasks of one environment by how they go: those that are always solved, or never, seldom come up."""

from collections import Counter

from ....records.task import Pool, Task
from ..limits import DifficultyRule

MAX_POOLED = 10_000
"""Tasks in one pool; when there are more, the one that has been in it longest is normal again."""


class Difficulty:
    """A task is normal until a group of it was as good as `easy_at`, or as bad as `hard_at`. Out of its
    pool it comes in turn, as often as the pool's share allows; one group that goes otherwise, and it is
    normal again."""

    def __init__(self, rule: DifficultyRule) -> None:
        self._shares: dict[Pool, float] = {"hard": rule.hard_share, "easy": rule.easy_share}
        self._rule = rule
        self._waiting: dict[Pool, dict[str, Task]] = {"hard": {}, "easy": {}}
        self._pool_of: dict[str, Pool] = {}
        self._num_taken: Counter[Pool] = Counter()
        self._num_groups = 0

    def put(self, task: Task, pool: Pool) -> None:
        waiting = self._waiting[pool]
        waiting[task.id] = task
        self._pool_of[task.id] = pool
        if len(waiting) > MAX_POOLED:
            oldest = next(iter(waiting))
            del waiting[oldest], self._pool_of[oldest]

    def is_normal(self, task: Task) -> bool:
        return task.id not in self._pool_of

    def count(self, pool: Pool) -> int:
        return sum(one == pool for one in self._pool_of.values())

    def began(self) -> None:
        """A group starts, of whatever pool."""
        self._num_groups += 1

    def take_due(self) -> Task | None:
        """A task of a pool that has had less than its share of the groups."""
        for pool, share in self._shares.items():
            if self._waiting[pool] and self._num_taken[pool] < share * self._num_groups:
                return self._take(pool)
        return None

    def take_any(self) -> Task | None:
        """Where nothing is normal: the hard ones first."""
        pool = next((pool for pool in self._shares if self._waiting[pool]), None)
        return self._take(pool) if pool else None

    def _take(self, pool: Pool) -> Task:
        waiting = self._waiting[pool]
        self._num_taken[pool] += 1
        return waiting.pop(next(iter(waiting)))

    def pool_of(self, task: Task) -> Pool | None:
        return self._pool_of.get(task.id)

    def closed(self, task: Task, rewards: list[float]) -> bool:
        """A group of this task has closed: whether it is in another pool now. Without rewards it stays
        where it was."""
        was = self.pool_of(task)
        pool = _pool(self._rule, rewards) if rewards else was
        if was is not None:
            self._leave(task.id)
        if pool is not None:
            self.put(task, pool)
        return pool != was

    def _leave(self, id: str) -> None:
        self._waiting[self._pool_of.pop(id)].pop(id, None)


def _pool(rule: DifficultyRule, rewards: list[float]) -> Pool | None:
    mean = sum(rewards) / len(rewards)
    if mean >= rule.easy_at:
        return "easy"
    return "hard" if mean <= rule.hard_at else None
