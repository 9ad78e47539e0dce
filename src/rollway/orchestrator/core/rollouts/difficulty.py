"""Tasks of one environment by difficulty: those that are always solved, or never, are drawn rarely."""

from collections import Counter

from ....config.sections import DifficultyConfig
from ....records.task import Pool, Task

MAX_POOLED = 10_000
"""The most tasks in one pool. Above this, the task that was there longest becomes ordinary again."""
SHARES: dict[Pool, float] = {"hard": 0.1, "easy": 0.05}
"""The share of the groups that the tasks of each pool get. Hard tasks come first where both are due."""


class DifficultyPools:
    """Keeps the pools of one environment.

    A task is ordinary until a group of it has a mean reward of at least `easy_at` or at most `hard_at`.
    Tasks of a pool are drawn in order, as often as the share of the pool allows. One group with another
    result makes the task ordinary again.
    """

    def __init__(self, config: DifficultyConfig) -> None:
        self._config = config
        self._waiting: dict[Pool, dict[str, Task]] = {"hard": {}, "easy": {}}
        self.pool_of: dict[str, Pool] = {}
        """By the id of the task. A task that is not here is ordinary."""
        self.num_pooled: Counter[Pool] = Counter()
        self._num_taken: Counter[Pool] = Counter()
        self.num_groups = 0
        """Groups that started, whatever their pool."""

    def put(self, task: Task, pool: Pool) -> None:
        waiting = self._waiting[pool]
        waiting[task.id] = task
        if task.id not in self.pool_of:
            self.num_pooled[pool] += 1
        self.pool_of[task.id] = pool
        if len(waiting) > MAX_POOLED:
            self._leave(next(iter(waiting)))

    def take_due(self) -> Task | None:
        """Take a task of a pool that has had less than its share of the groups."""
        for pool, share in SHARES.items():
            if self._waiting[pool] and self._num_taken[pool] < share * self.num_groups:
                return self._take(pool)
        return None

    def take_any(self) -> Task | None:
        """Take a task of any pool, for an environment that has no ordinary task left."""
        pool = next((pool for pool in SHARES if self._waiting[pool]), None)
        return self._take(pool) if pool else None

    def _take(self, pool: Pool) -> Task:
        waiting = self._waiting[pool]
        self._num_taken[pool] += 1
        return waiting.pop(next(iter(waiting)))

    def closed(self, task: Task, rewards: list[float]) -> bool:
        """Note a closed group, and return whether its task changed pools. Without rewards it stays."""
        was = self.pool_of.get(task.id)
        pool = self._judge(rewards) if rewards else was
        if was is not None:
            self._leave(task.id)
        if pool is not None:
            self.put(task, pool)
        return pool != was

    def _leave(self, task_id: str) -> None:
        pool = self.pool_of.pop(task_id)
        self.num_pooled[pool] -= 1
        self._waiting[pool].pop(task_id, None)

    def _judge(self, rewards: list[float]) -> Pool | None:
        mean, config = sum(rewards) / len(rewards), self._config
        if config.easy_at is not None and mean >= config.easy_at:
            return "easy"
        return "hard" if config.hard_at is not None and mean <= config.hard_at else None
