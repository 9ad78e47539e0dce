"""How many workers there should be. Pure."""

from math import ceil

from msgspec import Struct

from ...records.ids import WorkerName

PRESSED_S = 3.0
"""How long work must wait while every worker is full before more are started."""


class WorkerLoad(Struct, frozen=True):
    """How the workers do at one moment."""

    num_waiting: int
    is_full: bool
    """Whether no worker has room for what waits next."""
    num_up: int
    credits: int
    """Rollouts a worker runs at a time."""
    idle: tuple[WorkerName, ...] = ()
    """Workers that run nothing."""


class Scaling:
    """Between `least` and `most` places. More while work waits, fewer when workers have idled long."""

    def __init__(self, least: int, most: int, idle_s: float) -> None:
        self._least = least
        self._most = most
        self._idle_s = idle_s
        self._pressed_at_s: float | None = None
        self._idle_at_s: dict[WorkerName, float] = {}
        self.num_places = least

    def more(self, now_s: float, load: WorkerLoad) -> int:
        """How many places to open now. Those that are opening already come first."""
        if not (load.num_waiting and load.is_full) or load.num_up < self.num_places:
            self._pressed_at_s = None
            return 0
        if self._pressed_at_s is None:
            self._pressed_at_s = now_s
        if now_s - self._pressed_at_s < PRESSED_S:
            return 0
        wanted = ceil(load.num_waiting / max(1, load.credits))
        count = min(wanted, self._most - self.num_places)
        self.num_places += count
        self._pressed_at_s = None
        return count

    def fewer(self, now_s: float, load: WorkerLoad) -> list[WorkerName]:
        """Which workers to let go now: of those that have idled for long, the last names first, so that
        the first worker, which walks through the tasks, stays."""
        since_s = {name: self._idle_at_s.get(name, now_s) for name in load.idle}
        self._idle_at_s = since_s
        if load.num_waiting:
            return []
        spare = min(self.num_places, load.num_up) - self._least
        tired = [name for name, at_s in since_s.items() if now_s - at_s >= self._idle_s]
        chosen = sorted(tired, reverse=True)[: max(0, spare)]
        self.num_places -= len(chosen)
        for name in chosen:
            del self._idle_at_s[name]
        return chosen
