"""Rollouts that wait for a worker. Pure; every operation costs the same, no matter how many wait."""

from collections import OrderedDict
from collections.abc import Iterable

from ...records.ids import RolloutId

Unit = dict[RolloutId, None]
"""Keys that go to one worker together: a single rollout, or a group."""


class RunQueue:
    """First come, first served within a client. Clients take turns, so that no client waits for all
    rollouts of another."""

    def __init__(self) -> None:
        self._queues: OrderedDict[bytes, OrderedDict[int, Unit]] = OrderedDict()
        self._positions: dict[RolloutId, tuple[bytes, int]] = {}
        """The client of each waiting key, and the number of its unit."""
        self._counts: dict[bytes, int] = {}
        self._last_number = 0

    def __len__(self) -> int:
        return len(self._positions)

    def count(self, client: bytes) -> int:
        return self._counts.get(client, 0)

    def add(self, client: bytes, keys: Iterable[RolloutId], *, first: bool = False) -> None:
        """Add one unit behind all others of its client, or before them."""
        unit = dict.fromkeys(keys)
        self._last_number = number = self._last_number + 1
        queue = self._queues.setdefault(client, OrderedDict())
        queue[number] = unit
        if first:
            queue.move_to_end(number, last=False)
        self._counts[client] = self.count(client) + len(unit)
        for key in unit:
            self._positions[key] = client, number

    def remove(self, key: RolloutId) -> bool:
        """Remove one rollout from the queue. Return False if it does not wait."""
        position = self._positions.pop(key, None)
        if position is None:
            return False
        client, number = position
        unit = self._queues[client][number]
        del unit[key]
        self._counts[client] -= 1
        if not unit:
            self._remove_unit(client, number)
        return True

    def next_unit(self) -> list[RolloutId]:
        """Return the rollouts of the next unit; none if nothing waits."""
        if not self._queues:
            return []
        queue = next(iter(self._queues.values()))
        return list(next(iter(queue.values())))

    def next_size(self) -> int:
        return len(self.next_unit())

    def take(self) -> list[RolloutId]:
        """Take the next unit. The one after it comes from the next client."""
        client, queue = next(iter(self._queues.items()))
        number, unit = next(iter(queue.items()))
        for key in unit:
            del self._positions[key]
        self._counts[client] -= len(unit)
        self._queues.move_to_end(client)
        self._remove_unit(client, number)
        return list(unit)

    def _remove_unit(self, client: bytes, number: int) -> None:
        del self._queues[client][number]
        if not self._queues[client]:
            del self._queues[client], self._counts[client]
