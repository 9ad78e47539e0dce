"""Which task comes next: environments are mixed by ratio, each in its own order, and pulled ahead of
need."""

from collections import deque
from collections.abc import Collection, Mapping

from msgspec import Struct, field

from ....config.sections import DifficultyConfig
from ....records.task import Pool, Task
from ..commands import PoolTask, PullTasks
from ..events import TasksArrived
from .difficulty import DifficultyPools

MOST_SHARES = 4
"""An environment whose groups are rarely useful gets more of them, up to this many times its share."""
MAX_PASSED_OVER = 1000
"""Tasks of an endless environment that may be passed over in a row because they are in a pool."""


class _TaskSource(Struct):
    """The tasks of one environment. `next` is the position of the first task in `buffer`, `pulled` the
    position of the first task not yet asked for. `size` is known once the end was seen."""

    ratio: float
    next: int
    pulled: int
    difficulty: DifficultyPools
    buffer: deque[Task] = field(default_factory=deque)
    pulling: bool = False
    num_taken: int = 0
    num_useless: int = 0
    num_passed_over: int = 0
    size: int | None = None

    @property
    def share(self) -> float:
        """How much the environment has had so far, in units of its ratio. Groups that did not train are
        not counted, but at least a quarter (1 / MOST_SHARES) of all its groups is."""
        taken = self.num_taken
        return max(taken - self.num_useless, taken / MOST_SHARES) / self.ratio

    def take(self) -> Task | None:
        """Take a task of a pool that is due, else the next ordinary task. After a whole round without an
        ordinary task, one of a pool is taken all the same."""
        a_round = MAX_PASSED_OVER if self.size is None else self.size
        task = self.difficulty.take_due()
        while task is None and self.buffer:
            first = self.buffer[0]
            is_ordinary = first.id not in self.difficulty.pool_of
            if not is_ordinary and self.num_passed_over < a_round:
                self.num_passed_over += 1
                self._pop()
                continue
            pooled = None if is_ordinary else self.difficulty.take_any()
            task = pooled or self._pop()
            self.num_passed_over = 0
        return task

    def _pop(self) -> Task:
        self.next += 1
        if self.next == self.size:
            self.next = 0
        return self.buffer.popleft()


class TaskMix:
    """Hands out tasks so that what trains follows the ratios. After the last task comes the first."""

    def __init__(
        self,
        ratios: Mapping[str, float],
        cursors: Mapping[str, int],
        ahead: int,
        difficulty: DifficultyConfig,
    ) -> None:
        """`cursors` are the positions to start from, `ahead` is how many tasks are kept ready."""
        self._sources: dict[str, _TaskSource] = {}
        for env, ratio in ratios.items():
            start = cursors.get(env, 0)
            self._sources[env] = _TaskSource(ratio, start, start, DifficultyPools(difficulty))
        self._ahead = ahead

    @property
    def empty_env(self) -> str | None:
        empty = (env for env, source in self._sources.items() if source.size == 0)
        return next(empty, None)

    def position(self, env: str) -> int:
        return self._sources[env].next

    def pooled(self, pool: Pool) -> dict[str, int]:
        sources = self._sources.items()
        return {env: source.difficulty.num_pooled[pool] for env, source in sources}

    def take(
        self, silent: Collection[str] = (), full: Collection[str] = ()
    ) -> tuple[str, Task] | None:
        """Take the next task of the environment that is furthest behind its share, or None to wait.

        A silent environment gets no tasks, and does not catch up later. If the environment that is
        furthest behind has no room for a group (`full`), the others wait for it, which keeps the mix
        true to the ratios.
        """
        answering = [env for env in self._sources if env not in silent]
        if not answering:
            return None
        env = min(answering, key=lambda name: (self._sources[name].share, name))
        source = self._sources[env]
        for name in silent:
            other = self._sources[name]
            other.num_taken += max(0, int((source.share - other.share) * other.ratio))
        if env in full:
            return None
        task = source.take()
        if task is None:
            return None
        source.num_taken += 1
        source.difficulty.num_groups += 1
        return env, task

    def did_not_train(self, env: str) -> None:
        """A group did not train, so it does not count into the environment's share."""
        self._sources[env].num_useless += 1

    def closed(self, env: str, task: Task, rewards: list[float]) -> list[PoolTask]:
        difficulty = self._sources[env].difficulty
        has_moved = difficulty.closed(task, rewards)
        return [PoolTask(env, task, difficulty.pool_of.get(task.id))] if has_moved else []

    def put(self, env: str, task: Task, pool: Pool) -> None:
        """Restore a task that was in this pool before a restart."""
        if env in self._sources:
            self._sources[env].difficulty.put(task, pool)

    def is_waiting_for(self, env: str) -> bool:
        """Return whether the environment was asked for tasks and none are left meanwhile."""
        source = self._sources[env]
        return source.pulling and not source.buffer

    def pull(self) -> list[PullTasks]:
        """Ask for more where less than half of what is kept ahead is left."""
        pulls = []
        for env, source in self._sources.items():
            if not source.pulling and len(source.buffer) * 2 < self._ahead:
                source.pulling = True
                pulls.append(PullTasks(env, source.pulled, self._ahead))
        return pulls

    def arrived(self, event: TasksArrived) -> None:
        source, start = self._sources[event.env], event.start
        # An empty page shows where the tasks end only if the tasks before it were seen. After a restart
        # `start` is a saved position, which may lie beyond the end of a dataset that has shrunk since.
        known_end = source.pulled if source.buffer or source.num_taken else None
        source.pulling = False
        source.buffer.extend(event.tasks)
        source.pulled = start + len(event.tasks)
        if event.exhausted:
            if event.tasks or start in (0, known_end):
                source.size = source.pulled
            source.pulled = 0
            if not source.buffer:
                source.next = 0
