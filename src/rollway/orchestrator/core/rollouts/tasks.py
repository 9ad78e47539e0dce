"""Which task comes next: environments mixed by ratio, each in its own order, pulled ahead of need."""

from collections import deque
from collections.abc import Collection

from msgspec import Struct, field

from ....records.task import Pool, Task
from ..commands import PoolTask, PullTasks
from ..limits import DifficultyRule
from .difficulty import Difficulty

MOST_SHARES = 4
"""An environment whose groups are seldom of use gets more of them, up to so many times its share."""
MAX_PASSED_OVER = 1000
"""Tasks of an endless environment that are passed over in a row because they are not normal."""


class _TaskSource(Struct):
    """One environment's tasks: `next` is the position of the first in `buffer`, `pulled` of the first
    not yet asked for. `size` is known once the end was seen."""

    ratio: float
    next: int
    pulled: int
    difficulty: Difficulty
    buffer: deque[Task] = field(default_factory=deque)
    pulling: bool = False
    num_taken: int = 0
    num_useless: int = 0
    num_passed_over: int = 0
    size: int | None = None

    @property
    def share(self) -> float:
        """What it has had so far, in units of its ratio: groups that train, or may."""
        return max(self.num_taken - self.num_useless, self.num_taken / MOST_SHARES) / self.ratio

    def take(self) -> Task | None:
        task = self.difficulty.take_due()
        while task is None and self.buffer:
            first = self.buffer[0]
            if not self.difficulty.is_normal(first) and self.num_passed_over < self._all:
                self.num_passed_over += 1
                self._pop()
                continue
            other = None if self.difficulty.is_normal(first) else self.difficulty.take_any()
            task = other or self._pop()
            self.num_passed_over = 0
        return task

    @property
    def _all(self) -> int:
        return MAX_PASSED_OVER if self.size is None else self.size

    def _pop(self) -> Task:
        self.next += 1
        if self.next == self.size:
            self.next = 0
        return self.buffer.popleft()


class TaskMix:
    """Hands out tasks so that each environment's share of what trains follows its ratio. After the last
    task comes the first."""

    def __init__(
        self, ratios: dict[str, float], cursors: dict[str, int], ahead: int,
        difficulty: DifficultyRule | None = None,
    ) -> None:  # fmt: skip
        rule = difficulty or DifficultyRule()
        self._sources = {
            env: _TaskSource(ratio, cursors.get(env, 0), cursors.get(env, 0), Difficulty(rule))
            for env, ratio in ratios.items()
        }
        self._ahead = ahead

    @property
    def empty_env(self) -> str | None:
        """An environment that has no tasks at all."""
        return next((env for env, source in self._sources.items() if source.size == 0), None)

    def position(self, env: str) -> int:
        """Of the task that comes next."""
        return self._sources[env].next

    def pooled(self, pool: Pool) -> dict[str, int]:
        """How many tasks of each environment are in a pool."""
        return {env: source.difficulty.count(pool) for env, source in self._sources.items()}

    def take(self, silent: Collection[str] = (), full: Collection[str] = ()) -> tuple[str, Task] | None:
        """The next task of the environment that is furthest behind its share; None: wait for it. Silent
        environments get none, and do not catch up later; for one that is full it is waited."""
        heard = [name for name in self._sources if name not in silent]
        if not heard:
            return None
        env = min(heard, key=lambda name: (self._sources[name].share, name))
        source = self._sources[env]
        for name in silent:
            other = self._sources[name]
            other.num_taken += max(0, int((source.share - other.share) * other.ratio))
        if env in full or (task := source.take()) is None:
            return None
        source.num_taken += 1
        source.difficulty.began()
        return env, task

    def useless(self, env: str) -> None:
        """A group did not train: it does not count into the environment's share."""
        self._sources[env].num_useless += 1

    def closed(self, env: str, task: Task, rewards: list[float]) -> list[PoolTask]:
        """A group of this task has closed; it may be in another pool now."""
        difficulty = self._sources[env].difficulty
        moved = difficulty.closed(task, rewards)
        return [PoolTask(env, task, difficulty.pool_of(task))] if moved else []

    def put(self, env: str, task: Task, pool: Pool) -> None:
        """A task was in this pool before a restart."""
        if env in self._sources:
            self._sources[env].difficulty.put(task, pool)

    def is_waiting_for(self, env: str) -> bool:
        """Whether an environment was asked for tasks, and has given none that are left."""
        source = self._sources[env]
        return source.pulling and not source.buffer

    def pull(self) -> list[PullTasks]:
        """Ask for more where less than half of what is kept ahead is left."""
        wanted = []
        for env, source in self._sources.items():
            if not source.pulling and len(source.buffer) * 2 < self._ahead:
                source.pulling = True
                wanted.append(PullTasks(env, source.pulled, self._ahead))
        return wanted

    def arrived(self, env: str, start: int, tasks: tuple[Task, ...], exhausted: bool) -> None:
        source = self._sources[env]
        known = source.pulled if source.buffer or source.num_taken else None
        source.pulling = False
        source.buffer.extend(tasks)
        source.pulled = start + len(tasks)
        if exhausted:
            source.size = start + len(tasks) if tasks or start in (0, known) else source.size
            source.pulled = 0
            if not source.buffer:
                source.next = 0
