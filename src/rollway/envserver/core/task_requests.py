"""Requests for tasks that are not answered yet. Pure."""

from msgspec import Struct

from ...records.ids import WorkerName
from ...records.task import Split
from ...wire.messages import NextTasks, Tasks
from .worker_pool import WorkerPool

MAX_OPEN = 64
"""Requests of one client that may be open at the same time."""

_RequestKey = tuple[bytes, Split, int]
"""The client, the split, and the position of the first task."""


class _OpenRequest(Struct):
    message: NextTasks
    worker: WorkerName | None = None


class TaskRequests:
    """Gives all requests to one worker while it lives: another worker would have to walk through the
    tasks from the start."""

    def __init__(self) -> None:
        self._open: dict[_RequestKey, _OpenRequest] = {}

    def add(self, client: bytes, request: NextTasks) -> bool:
        """Add a request. Return False if its client has too many open already."""
        key = client, request.split, request.start
        if (
            key not in self._open
            and sum(other == client for other, _, _ in self._open) >= MAX_OPEN
        ):
            return False
        self._open[key] = _OpenRequest(request)
        return True

    def forget(self, client: bytes) -> None:
        for key in [key for key in self._open if key[0] == client]:
            del self._open[key]

    def assign(self, pool: WorkerPool) -> list[tuple[WorkerName, NextTasks]]:
        """Return the requests that no living worker has, with the worker to send them to."""
        if not pool.open:
            return []
        worker = min(pool.open)
        assigned = []
        for request in self._open.values():
            if request.worker is None or request.worker not in pool:
                request.worker = worker
                assigned.append((worker, request.message))
        return assigned

    def answered(self, worker: WorkerName, tasks: Tasks) -> bytes | None:
        """Return the client whose request a worker has answered: the first of several equal requests."""
        for key, request in self._open.items():
            client, split, start = key
            if (split, start) == (tasks.split, tasks.start) and request.worker == worker:
                del self._open[key]
                return client
        return None
