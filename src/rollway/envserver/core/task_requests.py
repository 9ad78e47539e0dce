"""Tasks that clients wait for. Pure."""

from msgspec import Struct

from ...records.ids import WorkerName
from ...records.task import Split
from ...wire.messages import NextTasks, Tasks
from .open_runs import NO_WORKER
from .worker_pool import WorkerPool

MAX_OPEN = 64
"""Questions of one client that may wait for an answer."""

_Question = tuple[bytes, Split, int]


class _OpenRequest(Struct):
    wanted: NextTasks
    worker: WorkerName = NO_WORKER


class TaskRequests:
    """One worker, always the same while it lives, walks through the tasks: going back costs."""

    def __init__(self) -> None:
        self._asked: dict[_Question, _OpenRequest] = {}

    def add(self, client: bytes, wanted: NextTasks) -> bool:
        """Take a question; False if its client has too many open already."""
        question = client, wanted.split, wanted.start
        if question not in self._asked and sum(one[0] == client for one in self._asked) >= MAX_OPEN:
            return False
        self._asked[question] = _OpenRequest(wanted)
        return True

    def forget(self, client: bytes) -> None:
        for question in [one for one in self._asked if one[0] == client]:
            del self._asked[question]

    def ask(self, pool: WorkerPool) -> list[tuple[WorkerName, NextTasks]]:
        """Questions no living worker was asked yet."""
        if not pool.open:
            return []
        walker = min(pool.open)
        orders = []
        for asked in self._asked.values():
            if asked.worker not in pool:
                asked.worker = walker
                orders.append((walker, asked.wanted))
        return orders

    def answered(self, worker: WorkerName, tasks: Tasks) -> bytes | None:
        """The client whose question this answers: of several that are alike, the first."""
        for question, asked in self._asked.items():
            if question[1:] == (tasks.split, tasks.start) and asked.worker == worker:
                del self._asked[question]
                return question[0]
        return None
