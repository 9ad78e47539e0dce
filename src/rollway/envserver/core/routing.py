"""The router's decisions: events in, commands out. Pure.

Every Run that a client sends is answered by exactly one Settled, whatever dies. Clients do not see each
other: each hears of its own rollouts only, under the ids it chose.
"""

from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from ...config.sections import ServerConfig
from ...config.specs import ServerLimits
from ...records.ids import WorkerName
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
    ReplaceMe,
    RolloutPhases,
    RolloutProgress,
    Run,
    RunGroup,
    ServerStats,
    Tasks,
    ToClient,
    ToRouter,
    Unknown,
    Welcome,
)
from .blame import Loss
from .clients import Clients, Undelivered
from .dispatch import RouterDispatch, longest_rollout_s
from .events import (
    ClientMessage,
    ClientUnreachable,
    Commands,
    EndServer,
    KillWorker,
    LogNote,
    RetireWorker,
    RouterEvent,
    RouterStats,
    RouterTick,
    SendToClient,
    SendToWorker,
    StartWorker,
    StopServer,
    WorkerDied,
    WorkerMessage,
    WorkerSilent,
)
from .leases import Leases
from .scaling import Scaling, WorkerLoad
from .task_requests import MAX_OPEN, TaskRequests
from .worker_pool import WorkerPool

END_S = 60.0
"""A drained worker has this long to end, beyond the time that its toolsets may take to close."""


class Routing:
    """The router's state. The router calls nothing but `on_event` to change it."""

    def __init__(
        self,
        env_id: str,
        server: ServerConfig,
        limits: ServerLimits,
        terms: Mapping[str, str] | None = None,
    ) -> None:
        self._env_id = env_id
        self._terms = dict(terms or {})
        self._server = server
        self._limits = limits
        self._clients = Clients(limits.client_lease_s)
        self._undelivered = Undelivered()
        self._unwelcomed: dict[bytes, None] = {}
        """Clients that said Hello and wait for their Welcome."""
        self._is_known = False
        """Whether a worker has said what the environment needs."""
        self._pool = WorkerPool()
        self._leases: Leases[WorkerName] = Leases()
        lease_s = longest_rollout_s(server)
        self._dispatch = RouterDispatch(self._pool, limits.max_waiting, lease_s)
        self._task_requests = TaskRequests()
        self._scaling = Scaling(self.min_workers, server.workers, limits.idle_s)
        self._policies: dict[bytes, NewPolicy] = {}
        self._num_unexpected = 0

    @property
    def min_workers(self) -> int:
        return self._server.min_workers or self._server.workers

    @property
    def num_workers(self) -> int:
        """Workers that are up, also if they are about to end."""
        return len(self._pool)

    @property
    def num_open(self) -> int:
        return len(self._dispatch.open_runs)

    @property
    def num_dropped(self) -> int:
        """Messages that fit nothing the router knows: of strangers, sent twice, or answered already."""
        return self._num_unexpected + self._dispatch.num_twice

    @property
    def num_late(self) -> int:
        return self._dispatch.num_late

    def on_event(self, event: RouterEvent) -> Commands:
        match event:
            case ClientMessage(client, message, now_s):
                self._dispatch.at(now_s)
                return [*self._undelivered.take(client), *self._from_client(client, message)]
            case WorkerMessage(worker=worker, message=message, now_s=now_s):
                self._dispatch.at(now_s)
                if worker in self._pool:
                    self._leases.renew(worker)
                if isinstance(message, Settled):
                    return self._dispatch.settle(event, message)
                return self._from_worker(worker, message)
            case RouterStats(stats):
                return self._send_news(ServerStats(stats))
            case WorkerDied() | WorkerSilent():
                return self._lose(event)
            case ClientUnreachable(unsent):
                if self._clients.unreachable(unsent.client):
                    self._undelivered.keep(unsent)
                return []
            case RouterTick(now_s):
                return self._tick(now_s)
            case StopServer():
                return self._stop()
            case EndServer():
                return self._dispatch.end()

    def _from_client(self, client: bytes, message: ToRouter) -> Commands:
        match message:
            case Hello(protocol=protocol) if protocol != PROTOCOL:
                reason = f"this server speaks protocol {PROTOCOL}, the client {protocol}"
                return [SendToClient(client, Refused(reason))]
            case Hello():
                self._clients.hello(client)
                self._unwelcomed[client] = None
                return self._welcome()
            case FrameTaken(worker, num_bytes):
                return self._dispatch.frame_taken(client, worker, num_bytes)
            case Ping() if not self._clients.heard(client):
                self._num_unexpected += 1
                return [SendToClient(client, Unknown())]
            case _ if not self._clients.heard(client):
                pass  # a stranger
            case Ping():
                return []
            case NextTasks(start=start, split=split) as request:
                if self._task_requests.add(client, request):
                    return self._request_tasks()
                error = f"{MAX_OPEN} requests for tasks are open already, the most a client may have"
                return [SendToClient(client, Tasks(start, (), error=error, split=split))]
            case Run() as run:
                return self._dispatch.take(client, (run,))
            case RunGroup() as group:
                return self._dispatch.take(client, group.runs)
            case Cancel(rollout_id, reason):
                return self._dispatch.cancel(client, rollout_id, reason)
            case NewPolicy() as policy:
                number = self._dispatch.open_runs.number_of(client)
                self._policies[client] = own = replace(policy, client=number)
                return [SendToWorker(worker, own) for worker in self._pool]
        self._num_unexpected += 1
        return []

    def _welcome(self) -> Commands:
        """Welcome the clients that wait for it, once a worker has said how they must send their runs."""
        if not self._is_known:
            return []
        whole_groups, num_workers = self._dispatch.whole_groups, len(self._pool)
        welcome = Welcome(
            self._env_id, num_workers, whole_groups=whole_groups, terms=self._terms
        )
        unwelcomed, self._unwelcomed = list(self._unwelcomed), {}
        return [SendToClient(client, welcome) for client in unwelcomed]

    def _send_news(self, message: ToClient) -> Commands:
        return [SendToClient(client, message) for client in self._clients.listening()]

    def _from_worker(self, worker: WorkerName, message: ToRouter) -> Commands:
        match message:
            case Hello(credits=credits, whole_groups=whole_groups):
                return self._greet(worker, credits, whole_groups)
            case Tasks() as tasks:
                client = self._task_requests.answered(worker, tasks)
                if client is not None:
                    return [SendToClient(client, tasks)]
            case ServerStats(stats):
                if worker in self._pool:
                    self._pool.note(worker, stats)  # which may give it, or others, more room
                return self._send_news(message) + self._dispatch.assign()
            case RolloutPhases(rollouts=rollouts):
                return self._send_progress(worker, rollouts)
            case ReplaceMe(reason) if worker in self._pool:
                note = LogNote(f"{worker} is replaced once its rollouts have ended: {reason}")
                return [note, *self._drain(worker)]
            case Drained():
                return self._lose(WorkerDied(worker, "ended"))
        self._num_unexpected += 1
        return []

    def _greet(self, worker: WorkerName, credits: int, whole_groups: bool) -> Commands:
        self._is_known, self._dispatch.whole_groups = True, whole_groups
        self._pool.add(worker, credits)
        self._leases.renew(worker)
        policies = [SendToWorker(worker, policy) for policy in self._policies.values()]
        commands: Commands = [*policies, *self._welcome()]
        if self._dispatch.is_stopping:
            return commands + self._drain(worker)
        return commands + self._request_tasks() + self._dispatch.assign()

    def _send_progress(
        self, worker: WorkerName, rollouts: Iterable[RolloutProgress]
    ) -> Commands:
        by_client = self._dispatch.progress(worker, rollouts)
        return [
            SendToClient(client, RolloutPhases(worker, tuple(by_client[client])))
            for client in self._clients.listening()
            if client in by_client
        ]

    def _lose(self, loss: Loss) -> Commands:
        """Remove a worker that is gone, and move or end its rollouts. The second loss does nothing."""
        lost = self._pool.remove(loss.worker)
        if lost is None:
            return []
        self._leases.end(loss.worker)
        commands, news = self._dispatch.lose_worker(lost.running, loss)
        commands += self._request_tasks()
        if lost.is_draining and not lost.running:
            return commands  # the router had drained it
        return commands + self._send_news(news)

    def _tick(self, now_s: float) -> Commands:
        self._dispatch.at(now_s)
        self._clients.tick(now_s)
        self._leases.tick(now_s)
        commands: Commands = []
        for client in self._clients.silent():
            commands += self._leave(client)
        for worker in sorted(self._leases.silent(self._server.lease_s)):
            commands += self._kill(worker, self._leases.silence_s(worker), "was silent")
        commands += self._end_overdue()
        limit_s = END_S + self._server.tool_deadline_s
        for worker in self._pool.not_ending(now_s, limit_s):
            commands += self._kill(worker, limit_s, "was told to end and did not")
        return commands if self._dispatch.is_stopping else commands + self._scale(now_s)

    def _kill(self, worker: WorkerName, late_s: float, problem: str) -> Commands:
        self._leases.end(worker)
        self._pool.mark_for_kill(worker)
        note = f"{worker} {problem} for {late_s:.1f} s: killing it"
        return [LogNote(note), KillWorker(worker, late_s)]

    def _end_overdue(self) -> Commands:
        """End the rollouts whose worker should have reported their end long ago. It may have lost them,
        so it is replaced once the others have ended."""
        commands: Commands = []
        for run in self._dispatch.overdue():
            worker = run.worker
            commands += self._dispatch.end_overdue(run)
            if worker is not None and worker in self._pool:
                commands += self._drain(worker)
        return commands

    def _leave(self, client: bytes) -> Commands:
        self._clients.away(client)
        self._undelivered.take(client)
        self._policies.pop(client, None)
        self._unwelcomed.pop(client, None)
        self._task_requests.forget(client)
        reason = f"its client was silent for more than {self._limits.client_lease_s:g} s"
        return self._dispatch.leave(client, reason)

    def _scale(self, now_s: float) -> Commands:
        workers, waiting = self._pool.open, self._dispatch.waiting
        size = waiting.next_size()
        load = WorkerLoad(
            num_waiting=len(waiting),
            is_full=bool(size) and self._pool.freest(size) is None,
            num_up=len(workers),
            credits=min((worker.credits for worker in workers.values()), default=1),
            idle=tuple(name for name, worker in workers.items() if not worker.running),
        )
        num_to_open = self._scaling.num_to_open(now_s, load)
        commands: Commands = [StartWorker() for _ in range(num_to_open)]
        for name in self._scaling.to_retire(now_s, load):
            commands += [RetireWorker(name), *self._drain(name)]
        return commands

    def _drain(self, worker: WorkerName) -> Commands:
        self._pool.drain(worker)
        return [SendToWorker(worker, Drain())]

    def _stop(self) -> Commands:
        commands = self._dispatch.stop()
        for worker in self._pool.open:
            commands += self._drain(worker)
        return commands

    def _request_tasks(self) -> Commands:
        assigned = self._task_requests.assign(self._pool)
        return [SendToWorker(worker, request) for worker, request in assigned]
