"""The router's core without a router: a test sends events, and sorts the commands that come back."""

from typing import Any

from rollway.config.sections import ServerConfig
from rollway.config.specs import ServerLimits
from rollway.envserver.core.events import (
    ClientMessage,
    RouterCommand,
    RouterEvent,
    RouterTick,
    SendToClient,
    SendToWorker,
    WorkerMessage,
)
from rollway.envserver.core.routing import Routing
from rollway.records.ids import PolicyVersion, RolloutId, WorkerName
from rollway.records.lag import LagStats, ProcessStats
from rollway.records.rollout import Failed, Settled
from rollway.records.task import Task
from rollway.records.turn import Sampling
from rollway.wire.messages import Hello, Ping, Run, RunGroup, ServerStats

TASK, SAMPLING = Task(id="0", prompt="?"), Sampling(8)
CLIENT, OTHER = b"client", b"other"
A, B = WorkerName("a"), WorkerName("b")
FAILED = Failed("env", "x")
ONE_WORKER = ServerConfig(workers=1)


def a_run(rollout_id: str) -> Run:
    return Run(RolloutId(rollout_id), 1, TASK, SAMPLING, PolicyVersion(0), 0)


def a_group(*rollout_ids: str) -> RunGroup:
    return RunGroup.of([a_run(rollout_id) for rollout_id in rollout_ids])


class CoreRouter:
    """A core with one client and some workers, at second 100."""

    def __init__(
        self, *workers: str, credits: int = 2, whole_groups: bool = False,
        server: ServerConfig = ONE_WORKER, **limits: Any,
    ) -> None:  # fmt: skip
        self.core = Routing("env", server, ServerLimits(**limits))
        self.now_s = 100.0
        self.on(RouterTick(self.now_s))
        self.on(ClientMessage(CLIENT, Hello("c")))
        for worker in workers:
            hello = Hello(worker, credits, whole_groups=whole_groups)
            self.on(WorkerMessage(WorkerName(worker), hello))

    def on(self, event: RouterEvent) -> list[RouterCommand]:
        self.last = self.core.on_event(event)
        return self.last

    def send(self, message: Any, client: bytes = CLIENT) -> list[RouterCommand]:
        return self.on(ClientMessage(client, message))

    def wait(
        self, seconds: float, *workers: WorkerName, pings: tuple[bytes, ...] = ()
    ) -> list[RouterCommand]:
        """Let time pass while these workers send statistics and these clients ping."""
        commands: list[RouterCommand] = []
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.now_s = min(until_s, self.now_s + 0.5)
            for worker in workers:
                commands += self.on(WorkerMessage(worker, stats(worker)))
            for client in pings:
                commands += self.send(Ping(), client)
            commands += self.on(RouterTick(self.now_s))
        return commands

    def settle(self, run: Run, worker: WorkerName, *frame: Any) -> list[RouterCommand]:
        settled = Settled(run.rollout_id, run.attempt, worker, FAILED)
        return self.on(WorkerMessage(worker, settled, *frame))


def stats(worker: str, p99_s: float = 0.0) -> ServerStats:
    return ServerStats(ProcessStats(worker, LagStats(p99=p99_s), 0))


def runs_sent(commands: list[RouterCommand]) -> dict[WorkerName, list[Run]]:
    """Return the runs that workers get, alone or in groups."""
    runs: dict[WorkerName, list[Run]] = {}
    for command in commands:
        match command:
            case SendToWorker(worker=worker, message=Run() as run):
                runs.setdefault(worker, []).append(run)
            case SendToWorker(worker=worker, message=RunGroup() as group):
                runs.setdefault(worker, []).extend(group.runs)
    return runs


def ends_sent(commands: list[RouterCommand], client: bytes = CLIENT) -> list[Settled]:
    to_client = [command for command in commands if isinstance(command, SendToClient)]
    messages = [command.message for command in to_client if command.client == client]
    return [message for message in messages if isinstance(message, Settled)]


def sent(commands: list[RouterCommand], kind: type[Any]) -> list[Any]:
    """Return the messages of one kind, to clients and to workers."""
    sending = [
        command for command in commands if isinstance(command, SendToClient | SendToWorker)
    ]
    return [command.message for command in sending if isinstance(command.message, kind)]
