"""The events that the router's core receives, and the commands it returns."""

from typing import Any

from msgspec import Struct

from ...records.ids import WorkerName
from ...records.lag import ProcessStats
from ...wire.messages import ToClient, ToRouter, ToWorker

Frame = Any
"""A raw frame beside a message. The router passes it on as it came. None if there is none."""


class SendToClient(Struct, frozen=True):
    client: bytes
    message: ToClient
    frame: Frame = None


class RunningCode(Struct, frozen=True):
    """What a worker's board showed when it was lost: the rollout whose code was running."""

    serial: int
    held_s: float
    """For how long the code had been running without a pause."""
    where: str = ""
    """file:line, if it was seen."""


class ClientMessage(Struct, frozen=True):
    client: bytes
    message: ToRouter
    now_s: float = 0.0


class WorkerMessage(Struct, frozen=True):
    worker: WorkerName
    message: ToRouter
    frame: Frame = None
    num_bytes: int = 0
    now_s: float = 0.0


class RouterStats(Struct, frozen=True):
    stats: ProcessStats


class WorkerDied(Struct, frozen=True):
    """A worker's process ended. With `by_sigkill` it was killed from outside."""

    worker: WorkerName
    how: str = "died"
    by_sigkill: bool = False
    mark: RunningCode | None = None


class WorkerSilent(Struct, frozen=True):
    """A worker was killed for its silence. If it was stopped from outside, no rollout is to blame."""

    worker: WorkerName
    silent_s: float
    was_stopped: bool = False
    mark: RunningCode | None = None


class ClientUnreachable(Struct, frozen=True):
    """This message could not be sent to its client."""

    unsent: SendToClient


class RouterTick(Struct, frozen=True):
    """Time passes, several times a second."""

    now_s: float


class StopServer(Struct, frozen=True):
    """Take no more rollouts, and let workers finish those they have."""


class EndServer(Struct, frozen=True):
    """The server ends now. Rollouts that are still open are cancelled."""


RouterEvent = (
    ClientMessage
    | WorkerMessage
    | RouterStats
    | WorkerDied
    | WorkerSilent
    | ClientUnreachable
    | RouterTick
    | StopServer
    | EndServer
)


class SendToWorker(Struct, frozen=True):
    worker: WorkerName
    message: ToWorker


class KillWorker(Struct, frozen=True):
    """Look at the worker's board, kill it, and answer with WorkerSilent."""

    worker: WorkerName
    silent_s: float


class StartWorker(Struct, frozen=True):
    """Open one more place and keep a worker alive in it."""


class RetireWorker(Struct, frozen=True):
    """Start no other worker in this one's place when it ends."""

    worker: WorkerName


class LogNote(Struct, frozen=True):
    text: str


RouterCommand = (
    SendToClient | SendToWorker | KillWorker | StartWorker | RetireWorker | LogNote
)
Commands = list[RouterCommand]
