"""Rollouts that wait for a worker. Pure; every operation costs the same however many wait."""

from collections import OrderedDict
from collections.abc import Iterable

from ...records.ids import RolloutId

Unit = dict[RolloutId, None]
"""Keys that go to one worker together: a single rollout, or a group."""


class RunQueue:
    """First come, first served within a client; clients take turns: none waits for another's crowd."""

    def __init__(self) -> None:
        self._queues: OrderedDict[bytes, OrderedDict[int, Unit]] = OrderedDict()
        self._place: dict[RolloutId, tuple[bytes, int]] = {}
        self._counts: dict[bytes, int] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._place)

    def count(self, client: bytes) -> int:
        return self._counts.get(client, 0)

    def add(self, client: bytes, keys: Iterable[RolloutId], *, first: bool = False) -> None:
        """One unit, behind all others of its client, or before them."""
        unit = dict.fromkeys(keys)
        self._next += 1
        queue = self._queues.setdefault(client, OrderedDict())
        queue[self._next] = unit
        if first:
            queue.move_to_end(self._next, last=False)
        self._counts[client] = self.count(client) + len(unit)
        for key in unit:
            self._place[key] = client, self._next

    def remove(self, key: RolloutId) -> bool:
        """Take one out, whatever its place; False if it does not wait."""
        place = self._place.pop(key, None)
        if place is None:
            return False
        client, number = place
        unit = self._queues[client][number]
        del unit[key]
        self._counts[client] -= 1
        if not unit:
            self._close(client, number)
        return True

    def next_size(self) -> int:
        """How many go together next; 0 if nobody waits."""
        if not self._queues:
            return 0
        queue = next(iter(self._queues.values()))
        return len(next(iter(queue.values())))

    def take(self) -> list[RolloutId]:
        """The next unit; it is the next client's turn then."""
        client, queue = next(iter(self._queues.items()))
        number, unit = next(iter(queue.items()))
        for key in unit:
            del self._place[key]
        self._counts[client] -= len(unit)
        self._queues.move_to_end(client)
        self._close(client, number)
        return list(unit)

    def _close(self, client: bytes, number: int) -> None:
        del self._queues[client][number]
        if not self._queues[client]:
            del self._queues[client], self._counts[client]
