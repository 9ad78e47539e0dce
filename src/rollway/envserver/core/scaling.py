"""Decides how many workers there should be. Pure."""

from math import ceil

from msgspec import Struct

from ...records.ids import WorkerName

PRESSED_S = 3.0
"""How long work must wait while every worker is full before more workers are started."""


class WorkerLoad(Struct, frozen=True):
    num_waiting: int
    is_full: bool
    """No worker has room for what waits next."""
    num_up: int
    credits: int
    """Rollouts that a worker runs at a time."""
    idle: tuple[WorkerName, ...] = ()


class Scaling:
    """Opens places up to `most` while work waits, and retires workers that are idle for `idle_s`."""

    def __init__(self, least: int, most: int, idle_s: float) -> None:
        self._least = least
        self._most = most
        self._idle_s = idle_s
        self._pressed_since_s: float | None = None
        self._idle_since_s: dict[WorkerName, float] = {}
        self.num_places = least

    def num_to_open(self, now_s: float, load: WorkerLoad) -> int:
        """Return how many places to open now: none while a place has no worker yet."""
        if not (load.num_waiting and load.is_full) or load.num_up < self.num_places:
            self._pressed_since_s = None
            return 0
        if self._pressed_since_s is None:
            self._pressed_since_s = now_s
        if now_s - self._pressed_since_s < PRESSED_S:
            return 0
        num_needed = ceil(load.num_waiting / max(1, load.credits))
        count = min(num_needed, self._most - self.num_places)
        self.num_places += count
        self._pressed_since_s = None
        return count

    def to_retire(self, now_s: float, load: WorkerLoad) -> list[WorkerName]:
        """Return the idle workers to retire now, those with the last names first. The worker with the
        first name answers requests for tasks; another one would have to walk through them again."""
        since_s = {name: self._idle_since_s.get(name, now_s) for name in load.idle}
        self._idle_since_s = since_s
        if load.num_waiting:
            return []
        num_spare = min(self.num_places, load.num_up) - self._least
        idle_for_long = [
            name for name, at_s in since_s.items() if now_s - at_s >= self._idle_s
        ]
        retired = sorted(idle_for_long, reverse=True)[: max(0, num_spare)]
        self.num_places -= len(retired)
        for name in retired:
            del self._idle_since_s[name]
        return retired
