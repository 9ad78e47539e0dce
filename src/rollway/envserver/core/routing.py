"""The router's decisions: what it is told in, what it commands out. Pure.

Every Run a client sends is answered by exactly one Settled, whatever dies. Clients do not see each
other: each hears of its own rollouts, under the ids it chose.
"""

from collections.abc import Iterable

from msgspec import Struct

from ...records.ids import PolicyVersion, WorkerName
from ...records.rollout import Settled
from ...wire.messages import (
    PROTOCOL,
    Cancel,
    Drain,
    Drained,
    FrameTaken,
    Hello,
    NewPolicy,
    NextTasks,
    Ping,
    Refused,
    RolloutProgress,
    Run,
    RunGroup,
    ServerStats,
    Tasks,
    ToClient,
    ToRouter,
    Welcome,
    WorkerLost,
    WorkerProgress,
)
from .blame import Loss
from .clients import Clients, Undelivered
from .dispatch import RouterDispatch
from .events import (
    ClientSays,
    ClientUnreachable,
    EndServer,
    KillWorker,
    RetireWorker,
    RouterCommand,
    RouterEvent,
    RouterTick,
    StartWorker,
    StopServer,
    TellClient,
    TellWorker,
    WorkerDied,
    WorkerSays,
    WorkerSilent,
)
from .leases import Leases
from .scaling import Scaling, WorkerLoad
from .task_requests import MAX_OPEN, TaskRequests
from .worker_pool import WorkerPool


class Bounds(Struct, frozen=True):
    """What one server is held to."""

    lease_s: float = 10.0
    client_lease_s: float = 30.0
    max_waiting: int = 20_000
    """Rollouts of one client that may wait for a worker."""
    min_workers: int = 1
    max_workers: int = 1
    idle_s: float = 60.0


class Routing:
    """The router's state. `on_event` is all there is."""

    def __init__(self, env: str, bounds: Bounds) -> None:
        self._env = env
        self._bounds = bounds
        self._clients = Clients(bounds.client_lease_s)
        self._kept = Undelivered()
        self._unwelcomed: dict[bytes, None] = {}
        self._is_known = False
        """Whether a worker has said what the environment needs."""
        self._pool = WorkerPool()
        self._leases: Leases[WorkerName] = Leases()
        self._dispatch = RouterDispatch(self._pool, bounds.max_waiting)
        self._asked = TaskRequests()
        self._scaling = Scaling(bounds.min_workers, bounds.max_workers, bounds.idle_s)
        self._version = PolicyVersion(0)
        self._num_unexpected = 0

    @property
    def num_workers(self) -> int:
        """Those that are up, also if they are about to end."""
        return len(self._pool)

    @property
    def num_owed(self) -> int:
        return len(self._dispatch.owed)

    @property
    def num_dropped(self) -> int:
        """Messages that nobody expected."""
        return self._num_unexpected + self._dispatch.num_twice

    @property
    def num_late(self) -> int:
        """Ends of attempts that were given up before they came."""
        return self._dispatch.num_late

    def on_event(self, event: RouterEvent) -> list[RouterCommand]:
        match event:
            case ClientSays(client=client, message=message, now_s=now_s):
                self._dispatch.at(now_s)
                return [*self._kept.take(client), *self._from_client(client, message)]
            case WorkerSays(worker=worker, message=message, now_s=now_s):
                self._dispatch.at(now_s)
                if worker in self._pool:
                    self._leases.renew(worker)
                if isinstance(message, Settled):
                    return self._dispatch.settle(event, message)
                return self._from_worker(worker, message)
            case WorkerDied() | WorkerSilent():
                return self._bury(event)
            case ClientUnreachable(told=told):
                if self._clients.unreachable(told.client):
                    self._kept.keep(told)
                return []
            case RouterTick(now_s=now_s):
                return self._tick(now_s)
            case StopServer():
                return self._stop()
            case EndServer():
                return self._dispatch.end()

    def _from_client(self, client: bytes, message: ToRouter) -> list[RouterCommand]:
        match message:
            case Hello(protocol=protocol) if protocol != PROTOCOL:
                reason = f"this server speaks protocol {PROTOCOL}, the client {protocol}"
                return [TellClient(client, Refused(reason))]
            case Hello():
                self._clients.hello(client)
                self._unwelcomed[client] = None
                return self._welcome()
            case FrameTaken(worker=worker, num_bytes=num_bytes):
                return self._dispatch.frame_taken(client, worker, num_bytes)
            case _ if self._clients.heard(client):
                return self._from_known(client, message)
        self._num_unexpected += 1
        return []

    def _from_known(self, client: bytes, message: ToRouter) -> list[RouterCommand]:
        match message:
            case Ping():
                return []
            case NextTasks() as wanted:
                if self._asked.add(client, wanted):
                    return self._ask_tasks()
                error = f"{MAX_OPEN} questions for tasks wait already, the most a client may have"
                return [TellClient(client, Tasks(wanted.start, (), error=error, split=wanted.split))]
            case Run() as run:
                return self._dispatch.take(client, (run,))
            case RunGroup(runs=runs):
                return self._dispatch.take(client, runs)
            case Cancel(rollout_id=id, reason=reason):
                return self._dispatch.cancel(client, id, reason)
            case NewPolicy(version=version):
                self._version = version
                return [TellWorker(worker, message) for worker in self._pool]
        self._num_unexpected += 1
        return []

    def _welcome(self) -> list[RouterCommand]:
        """Those that wait for it, once it is known how they should send their runs."""
        if not self._is_known:
            return []
        welcome = Welcome(self._env, len(self._pool), whole_groups=self._dispatch.whole_groups)
        waited, self._unwelcomed = list(self._unwelcomed), {}
        return [TellClient(client, welcome) for client in waited]

    def _news(self, message: ToClient) -> list[RouterCommand]:
        return [TellClient(client, message) for client in self._clients.listening()]

    def _from_worker(self, worker: WorkerName, message: ToRouter) -> list[RouterCommand]:
        match message:
            case Hello(credits=credits, whole_groups=whole_groups):
                return self._greet(worker, credits, whole_groups)
            case Tasks() as tasks:
                client = self._asked.answered(worker, tasks)
                if client is not None:
                    return [TellClient(client, tasks)]
            case ServerStats(stats=stats):
                if worker in self._pool:
                    self._pool.note(worker, stats)  # which may give it, or others, more room
                return self._news(message) + self._dispatch.assign()
            case WorkerProgress(rollouts=rollouts):
                return self._tell_progress(worker, rollouts)
            case Drained():
                return self._bury(WorkerDied(worker, "ended"))
        self._num_unexpected += 1
        return []

    def _greet(self, worker: WorkerName, credits: int, whole_groups: bool) -> list[RouterCommand]:
        self._is_known, self._dispatch.whole_groups = True, whole_groups
        self._pool.add(worker, credits)
        self._leases.renew(worker)
        news: list[RouterCommand] = [TellWorker(worker, NewPolicy(self._version)), *self._welcome()]
        if self._dispatch.is_stopping:
            return news + self._drain(worker)
        return news + self._ask_tasks() + self._dispatch.assign()

    def _tell_progress(
        self, worker: WorkerName, rollouts: Iterable[RolloutProgress]
    ) -> list[RouterCommand]:
        by_client = self._dispatch.progress(worker, rollouts)
        return [
            TellClient(client, WorkerProgress(worker, tuple(by_client[client])))
            for client in self._clients.listening()
            if client in by_client
        ]

    def _bury(self, loss: Loss) -> list[RouterCommand]:
        lost = self._pool.remove(loss.worker)
        if lost is None:
            return []
        self._leases.end(loss.worker)
        burial = self._dispatch.bury(lost.running, loss)
        commands = burial.commands + self._ask_tasks()
        if lost.is_draining and not lost.running:
            return commands  # it ended as it was told to
        notice = WorkerLost(loss.worker, burial.num_moved, burial.num_failed)
        return commands + self._news(notice)

    def _tick(self, now_s: float) -> list[RouterCommand]:
        self._dispatch.at(now_s)
        self._clients.tick(now_s)
        self._leases.tick(now_s)
        commands: list[RouterCommand] = []
        for client in self._clients.silent():
            commands += self._leave(client)
        for worker in sorted(self._leases.silent(self._bounds.lease_s)):
            commands.append(KillWorker(worker, self._leases.silence_s(worker)))
            self._leases.end(worker)
            self._pool.condemn(worker)
        return commands if self._dispatch.is_stopping else commands + self._scale(now_s)

    def _leave(self, client: bytes) -> list[RouterCommand]:
        self._clients.away(client)
        self._kept.take(client)
        self._unwelcomed.pop(client, None)
        self._asked.forget(client)
        why = f"its client was silent for more than {self._bounds.client_lease_s:g} s"
        return self._dispatch.leave(client, why)

    def _scale(self, now_s: float) -> list[RouterCommand]:
        workers, waiting = self._pool.open, self._dispatch.waiting
        size = waiting.next_size()
        load = WorkerLoad(
            num_waiting=len(waiting),
            is_full=bool(size) and self._pool.freest(size) is None,
            num_up=len(workers),
            credits=min((one.credits for one in workers.values()), default=1),
            idle=tuple(name for name, one in workers.items() if not one.running),
        )
        commands: list[RouterCommand] = [StartWorker() for _ in range(self._scaling.more(now_s, load))]
        for worker in self._scaling.fewer(now_s, load):
            commands += [RetireWorker(worker), *self._drain(worker)]
        return commands

    def _drain(self, worker: WorkerName) -> list[RouterCommand]:
        self._pool.drain(worker)
        return [TellWorker(worker, Drain())]

    def _stop(self) -> list[RouterCommand]:
        commands = self._dispatch.stop()
        for worker in self._pool.open:
            commands += self._drain(worker)
        return commands

    def _ask_tasks(self) -> list[RouterCommand]:
        return [TellWorker(worker, wanted) for worker, wanted in self._asked.ask(self._pool)]
