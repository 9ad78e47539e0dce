"""Bytes of raw frames on their way from workers to clients. Pure.

Every byte a worker sent is given back to it exactly once: because the client took it, or because the
client or the worker is gone.
"""

from ...records.ids import WorkerName


class FramesOnTheirWay:
    """Sums by client and worker; what is not on its way has no entry."""

    def __init__(self) -> None:
        self._bytes: dict[tuple[bytes, WorkerName], int] = {}

    def sent(self, client: bytes, worker: WorkerName, num_bytes: int) -> None:
        if num_bytes:
            self._bytes[client, worker] = self._bytes.get((client, worker), 0) + num_bytes

    def taken(self, client: bytes, worker: WorkerName, num_bytes: int) -> int:
        """How much of what a client says it took had been sent to it."""
        sent = self._bytes.pop((client, worker), 0)
        if num_bytes < sent:
            self._bytes[client, worker] = sent - num_bytes
        return min(sent, num_bytes)

    def lost_with(self, client: bytes) -> list[tuple[WorkerName, int]]:
        """What was on its way to a client that is gone."""
        ways = [way for way in self._bytes if way[0] == client]
        return [(way[1], self._bytes.pop(way)) for way in ways]

    def forget(self, worker: WorkerName) -> None:
        """A worker that is gone waits for nothing."""
        for way in [way for way in self._bytes if way[1] == worker]:
            del self._bytes[way]
