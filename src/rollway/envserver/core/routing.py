"""Which worker runs what, and what becomes of it when a worker dies. Pure.

Every Run a client sends is answered by exactly one Settled: by the worker that finished it, or by the
router when it was cancelled while it waited or its task killed too many workers.
"""

from collections import deque
from typing import Any

import msgspec
from msgspec import Struct

from ...records.ids import PolicyVersion, RolloutId, WorkerName
from ...records.rollout import Cancelled, Failed, Settled
from ...wire.messages import (
    PROTOCOL,
    Cancel,
    FrameTaken,
    Hello,
    NewPolicy,
    NextTasks,
    Refused,
    Run,
    Stats,
    Tasks,
    ToClient,
    ToRouter,
    ToWorker,
    Welcome,
    WorkerLost,
)
from .frames import FramesOnTheirWay

MAX_ATTEMPTS = 2
"""A rollout whose worker died this many times fails: its task probably kills workers."""
NO_WORKER = WorkerName("")

Frame = Any
"""Raw bytes beside a message: passed on as they came, never looked at. None where there are none."""


class ClientSays(Struct, frozen=True):
    client: bytes
    message: ToRouter


class WorkerSays(Struct, frozen=True):
    worker: WorkerName
    message: ToRouter
    frame: Frame = None
    num_bytes: int = 0
    """Of the frame."""


class WorkerDied(Struct, frozen=True):
    worker: WorkerName


class ClientGone(Struct, frozen=True):
    """A client cannot be reached: what is on its way to it is lost."""

    client: bytes


Event = ClientSays | WorkerSays | WorkerDied | ClientGone


class TellClient(Struct, frozen=True):
    client: bytes
    message: ToClient
    frame: Frame = None


class TellWorker(Struct, frozen=True):
    worker: WorkerName
    message: ToWorker


Command = TellClient | TellWorker


class _Entry(Struct):
    """A rollout the server owes an answer for."""

    client: bytes
    run: Run
    worker: WorkerName = NO_WORKER
    cancelled: str = ""


class _Asked(Struct):
    """Tasks a client waits for, and the worker that was asked for them."""

    wanted: NextTasks
    worker: WorkerName = NO_WORKER


class _Worker(Struct):
    credits: int
    running: set[RolloutId]

    @property
    def free(self) -> int:
        return self.credits - len(self.running)


class Routing:
    """The router's state. `on_event` is all there is."""

    def __init__(self, env: str) -> None:
        self._env = env
        self._clients: set[bytes] = set()
        self._absent: set[bytes] = set()
        self._workers: dict[WorkerName, _Worker] = {}
        self._entries: dict[RolloutId, _Entry] = {}
        self._queue: deque[RolloutId] = deque()
        self._asked: dict[tuple[bytes, int], _Asked] = {}
        self._version = PolicyVersion(0)
        self._frames = FramesOnTheirWay()
        self.num_dropped = 0

    @property
    def num_owed(self) -> int:
        return len(self._entries)

    def on_event(self, event: Event) -> list[Command]:
        match event:
            case ClientSays(client=client, message=message):
                return self._from_client(client, message)
            case WorkerSays(message=Settled() as settled):
                return self._settle(event, settled)
            case WorkerSays(worker=worker, message=message):
                return self._from_worker(worker, message)
            case WorkerDied(worker=worker):
                return self._bury(worker)
            case ClientGone(client=client):
                self._absent.add(client)
                lost = self._frames.lost_with(client)
                return [TellWorker(worker, FrameTaken(worker, size)) for worker, size in lost]

    @property
    def _listeners(self) -> list[bytes]:
        """Clients that were there when last spoken to; one that comes back is heard of again."""
        return sorted(self._clients - self._absent)

    def _from_client(self, client: bytes, message: ToRouter) -> list[Command]:
        self._absent.discard(client)
        match message:
            case Hello(protocol=protocol) if protocol != PROTOCOL:
                reason = f"this server speaks protocol {PROTOCOL}, the client {protocol}"
                return [TellClient(client, Refused(reason))]
            case Hello():
                self._clients.add(client)
                return [TellClient(client, Welcome(self._env, len(self._workers)))]
            case NextTasks() as wanted if client in self._clients:
                self._asked[client, wanted.start] = _Asked(wanted)
                return self._ask_tasks()
            case Run() as run if client in self._clients and run.rollout_id not in self._entries:
                self._entries[run.rollout_id] = _Entry(client, run)
                self._queue.append(run.rollout_id)
                return self._assign()
            case Cancel(rollout_id=id, reason=reason) if client in self._clients:
                return self._cancel(id, reason)
            case NewPolicy(version=version) if client in self._clients:
                self._version = version
                return [TellWorker(worker, message) for worker in self._workers]
            case FrameTaken(worker=worker, num_bytes=num_bytes):
                taken = self._frames.taken(client, worker, num_bytes)
                return [TellWorker(worker, FrameTaken(worker, taken))] if taken else []
        self.num_dropped += 1
        return []

    def _from_worker(self, worker: WorkerName, message: ToRouter) -> list[Command]:
        match message:
            case Hello(credits=credits):
                self._workers[worker] = _Worker(credits, set())
                news: list[Command] = [TellWorker(worker, NewPolicy(self._version))]
                return news + self._ask_tasks() + self._assign()
            case Tasks(start=start):
                clients = [client for client, at in self._asked if at == start]
                for client in clients:
                    del self._asked[client, start]
                return [TellClient(client, message) for client in clients]
            case Stats():
                return [TellClient(client, message) for client in self._listeners]
        self.num_dropped += 1
        return []

    def _settle(self, said: WorkerSays, settled: Settled) -> list[Command]:
        """Pass an end on, once: a late answer of a lost attempt is dropped and counted."""
        worker, size = said.worker, said.num_bytes
        entry = self._entries.get(settled.rollout_id)
        if entry is None or entry.worker != worker or entry.run.attempt != settled.attempt:
            self.num_dropped += 1
            return [TellWorker(worker, FrameTaken(worker, size))] if size else []
        self._frames.sent(entry.client, worker, size)
        del self._entries[settled.rollout_id]
        self._workers[worker].running.discard(settled.rollout_id)
        told: list[Command] = [TellClient(entry.client, settled, said.frame)]
        return told + self._assign()

    def _cancel(self, id: RolloutId, reason: str) -> list[Command]:
        entry = self._entries.get(id)
        if entry is None:
            return []
        if entry.worker:
            entry.cancelled = reason or "cancelled"
            return [TellWorker(entry.worker, Cancel(id, reason))]
        self._queue.remove(id)
        return [self._end_here(id, Cancelled(reason))]

    def _bury(self, worker: WorkerName) -> list[Command]:
        """Move a dead worker's rollouts to others; those that lost a worker before fail."""
        lost = self._workers.pop(worker, None)
        if lost is None:
            return []
        self._frames.forget(worker)
        commands: list[Command] = []
        moved = failed = 0
        for id in sorted(lost.running):
            entry = self._entries[id]
            if entry.cancelled:
                commands.append(self._end_here(id, Cancelled(entry.cancelled)))
                continue
            if entry.run.attempt >= MAX_ATTEMPTS:
                error = f"its worker died {MAX_ATTEMPTS} times, last {worker}"
                commands.append(self._end_here(id, Failed("worker", error)))
                failed += 1
                continue
            entry.run = msgspec.structs.replace(entry.run, attempt=entry.run.attempt + 1)
            entry.worker = NO_WORKER
            self._queue.appendleft(id)
            moved += 1
        notice = WorkerLost(worker, moved, failed)
        commands += [TellClient(client, notice) for client in self._listeners]
        return commands + self._ask_tasks() + self._assign()

    def _end_here(self, id: RolloutId, outcome: Cancelled | Failed) -> Command:
        entry = self._entries.pop(id)
        return TellClient(entry.client, Settled(id, entry.run.attempt, entry.worker, outcome))

    def _assign(self) -> list[Command]:
        """Give waiting rollouts to the workers with most room."""
        commands: list[Command] = []
        while self._queue and self._workers:
            worker = max(self._workers, key=lambda name: self._workers[name].free)
            if self._workers[worker].free <= 0:
                break
            id = self._queue.popleft()
            entry = self._entries[id]
            entry.worker = worker
            self._workers[worker].running.add(id)
            commands.append(TellWorker(worker, entry.run))
        return commands

    def _ask_tasks(self) -> list[Command]:
        """One worker, always the same while it lives, walks through the tasks."""
        commands: list[Command] = []
        for asked in self._asked.values():
            if self._workers and asked.worker not in self._workers:
                asked.worker = min(self._workers)
                commands.append(TellWorker(asked.worker, asked.wanted))
        return commands
