"""Rollouts and the workers that run them. Pure.

What is taken in is answered once: by the worker that finished it, or here.
"""

from collections.abc import Iterable

import msgspec
from msgspec import Struct

from ...records.ids import RolloutId, WorkerName
from ...records.rollout import Cancelled, Failed, Settled
from ...wire.messages import Cancel, FrameTaken, RolloutProgress, Run, RunGroup
from .blame import Loss, verdict
from .events import LogNote, RouterCommand, TellClient, TellWorker, WorkerSays
from .open_runs import NO_WORKER, OpenRun, OpenRuns, serial_of
from .run_queue import RunQueue
from .worker_pool import WorkerPool

ENDING = Cancelled("the env server is ending")


class LossResult(Struct, frozen=True):
    """What became of a lost worker's rollouts."""

    commands: list[RouterCommand]
    num_moved: int
    num_failed: int


class RouterDispatch:
    """Who is owed what, what waits, what runs where."""

    def __init__(self, pool: WorkerPool, max_waiting: int) -> None:
        self._pool = pool
        self._max_waiting = max_waiting
        self._frames = FramesInTransit()
        self._now_s = 0.0
        self.owed = OpenRuns()
        self.waiting = RunQueue()
        self.whole_groups = False
        self.is_stopping = False
        self.num_late = 0
        """Ends of attempts that were given up before they came."""
        self.num_twice = 0
        """Runs of rollouts that were owed already."""

    def at(self, now_s: float) -> None:
        """Time passes; 0 is for events that do not say."""
        self._now_s = max(self._now_s, now_s)

    def take(self, client: bytes, runs: tuple[Run, ...]) -> list[RouterCommand]:
        """Runs that go to one worker together. One that is owed already is not taken twice."""
        entries = self.owed.add(client, runs, self._now_s)
        self.num_twice += len(runs) - len(entries)
        if self.is_stopping:
            return [self._end(entry, ENDING) for entry in entries]
        limit = self._max_waiting
        if self.waiting.count(client) + len(entries) > limit:
            text = f"this client has {limit} rollouts waiting already, the most it may (env.max_waiting)"
            return [self._end(entry, Failed("worker", text)) for entry in entries]
        if entries:
            self.waiting.add(client, [entry.key for entry in entries])
        return self.assign()

    def assign(self) -> list[RouterCommand]:
        """Give what waits to the workers with most room. Nobody overtakes a group that waits for it."""
        commands: list[RouterCommand] = []
        while size := self.waiting.next_size():
            worker = self._pool.freest(size)
            if worker is None:
                break
            entries = [self.owed[key] for key in self.waiting.take()]
            for entry in entries:
                self._pool.give(worker, entry.key)
            runs = tuple(entry.given(worker, self._now_s) for entry in entries)
            message = RunGroup(runs) if self.whole_groups or size > 1 else runs[0]
            commands.append(TellWorker(worker, message))
        return commands

    def cancel(self, client: bytes, id: RolloutId, reason: str) -> list[RouterCommand]:
        """A waiting one ends here. A running one ends when its worker says so, or is lost."""
        entry = self.owed.find(client, id)
        if entry is None:
            return []
        if entry.worker == NO_WORKER:
            return [self._end(entry, Cancelled(reason)), *self.assign()]
        entry.cancelled = reason or "cancelled"
        return [TellWorker(entry.worker, Cancel(entry.key, reason))]

    def leave(self, client: bytes, why: str) -> list[RouterCommand]:
        """A client seems gone: its rollouts end, and are answered in case it is still there."""
        commands: list[RouterCommand] = []
        for entry in self.owed.of(client):
            if entry.worker != NO_WORKER and not entry.cancelled:
                commands.append(TellWorker(entry.worker, Cancel(entry.key, why)))
            commands.append(self._end(entry, Cancelled(why)))
        lost = self._frames.lost_with(client)
        commands += [TellWorker(worker, FrameTaken(worker, size)) for worker, size in lost]
        return commands + self.assign()

    def settle(self, said: WorkerSays, settled: Settled) -> list[RouterCommand]:
        """Pass an end on, once. Nobody waits for that of a lost attempt, or of a client that left."""
        worker, size, key = said.worker, said.num_bytes, settled.rollout_id
        was_running = self._pool.give_back(worker, key)
        entry = self.owed.get(key)
        if entry is None or entry.worker != worker or entry.run.attempt != settled.attempt:
            self.num_late += not was_running
            told: list[RouterCommand] = [TellWorker(worker, FrameTaken(worker, size))] if size else []
            return told + self.assign()
        self._frames.sent(entry.client, worker, size)
        self.owed.forget(entry)
        theirs = msgspec.structs.replace(settled, rollout_id=entry.id)
        return [TellClient(entry.client, theirs, said.frame), *self.assign()]

    def frame_taken(self, client: bytes, worker: WorkerName, num_bytes: int) -> list[RouterCommand]:
        taken = self._frames.taken(client, worker, num_bytes)
        return [TellWorker(worker, FrameTaken(worker, taken))] if taken else []

    def bury(self, keys: Iterable[RolloutId], loss: Loss) -> LossResult:
        """Move a lost worker's rollouts to others, members of a group together. One that is to blame,
        or has lost too many workers, fails."""
        self._frames.forget(loss.worker)
        commands: list[RouterCommand] = []
        groups: dict[tuple[bytes, int], list[RolloutId]] = {}
        num_failed = 0
        for entry in sorted(self._of(keys), key=lambda entry: serial_of(entry.key)):
            ended = self._fate(entry, loss)
            if ended is None:
                entry.leave()
                groups.setdefault((entry.client, entry.group), []).append(entry.key)
                continue
            if isinstance(ended, Failed):
                num_failed += 1
                commands.append(_accusation(entry, ended))
            commands.append(self._end(entry, ended))
        for (client, _), group in reversed(groups.items()):
            self.waiting.add(client, group, first=True)
        num_moved = sum(len(group) for group in groups.values())
        return LossResult(commands + self.assign(), num_moved, num_failed)

    def progress(
        self, worker: WorkerName, rollouts: Iterable[RolloutProgress]
    ) -> dict[bytes, list[RolloutProgress]]:
        """Each client's own rollouts of a worker, under its own ids."""
        mine: dict[bytes, list[RolloutProgress]] = {}
        for one in rollouts:
            entry = self.owed.get(one.rollout_id)
            if entry is not None and entry.worker == worker:
                theirs = msgspec.structs.replace(one, rollout_id=entry.id)
                mine.setdefault(entry.client, []).append(theirs)
        return mine

    def stop(self) -> list[RouterCommand]:
        """Nothing more is taken; what waits ends."""
        self.is_stopping = True
        return [self._end(entry, ENDING) for entry in self.owed.all() if entry.worker == NO_WORKER]

    def end(self) -> list[RouterCommand]:
        """Everything that is still owed ends here."""
        return [self._end(entry, ENDING) for entry in self.owed.all()]

    def _of(self, keys: Iterable[RolloutId]) -> list[OpenRun]:
        """What is still owed of `keys`."""
        return [entry for key in keys if (entry := self.owed.get(key)) is not None]

    def _fate(self, entry: OpenRun, loss: Loss) -> Cancelled | Failed | None:
        """How a lost worker's rollout ends; None if it may run again."""
        if entry.cancelled:
            return Cancelled(entry.cancelled)
        return verdict(entry, loss) or (ENDING if self.is_stopping else None)

    def _end(self, entry: OpenRun, outcome: Cancelled | Failed) -> RouterCommand:
        self.waiting.remove(entry.key)
        self.owed.forget(entry)
        return TellClient(entry.client, entry.settled(outcome))


def _accusation(entry: OpenRun, failed: Failed) -> RouterCommand:
    """No worker will log this failure."""
    return LogNote(
        f"{entry.key} failed ({failed.boundary}, attempt {entry.run.attempt}): {failed.error}"
    )


class FramesInTransit:
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
