"""Which task comes next: environments mixed by ratio, each in its own order, pulled ahead of need."""

from collections import deque
from collections.abc import Collection

from msgspec import Struct, field

from ...records.task import Task
from .commands import PullTasks


class _Source(Struct):
    """One environment's tasks: `next` is the position of the first in `buffer`, `pulled` of the first
    not yet asked for. `size` is known once the end was seen."""

    ratio: float
    next: int
    pulled: int
    buffer: deque[Task] = field(default_factory=deque)
    pulling: bool = False
    num_taken: int = 0
    size: int | None = None

    @property
    def behind(self) -> float:
        return self.num_taken / self.ratio


class TaskMix:
    """Hands out tasks so that each environment's share follows its ratio. After the last task comes
    the first."""

    def __init__(self, ratios: dict[str, float], cursors: dict[str, int], ahead: int) -> None:
        self._sources = {
            env: _Source(ratio, next=cursors.get(env, 0), pulled=cursors.get(env, 0))
            for env, ratio in ratios.items()
        }
        self._ahead = ahead

    @property
    def empty_env(self) -> str | None:
        """An environment that has no tasks at all."""
        return next((env for env, source in self._sources.items() if source.size == 0), None)

    def take(
        self, silent: Collection[str] = (), full: Collection[str] = ()
    ) -> tuple[str, Task, int] | None:
        """The next task of the environment that is furthest behind its share, and the position of the
        one after it; None: wait for it. Silent environments get none, and do not catch up later; for
        one that is full it is waited."""
        heard = [name for name in self._sources if name not in silent]
        if not heard:
            return None
        env = min(heard, key=lambda name: (self._sources[name].behind, name))
        source = self._sources[env]
        for name in silent:
            other = self._sources[name]
            other.num_taken = max(other.num_taken, int(source.behind * other.ratio))
        if not source.buffer or env in full:
            return None
        source.num_taken += 1
        source.next += 1
        if source.next == source.size:
            source.next = 0
        return env, source.buffer.popleft(), source.next

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
