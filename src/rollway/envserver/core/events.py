"""What the router's core is told, and what it commands."""

from typing import Any

from msgspec import Struct

from ...records.ids import WorkerName
from ...wire.messages import ToClient, ToRouter, ToWorker

Frame = Any
"""Raw bytes beside a message: passed on as they came, never looked at. None where there are none."""


class TellClient(Struct, frozen=True):
    client: bytes
    message: ToClient
    frame: Frame = None


class RunningCode(Struct, frozen=True):
    """What a worker's board showed when it was lost: the rollout whose code was running."""

    serial: int
    held_s: float
    """For how long it had been running without a pause."""
    where: str = ""
    """file:line, if it was seen."""


class ClientSays(Struct, frozen=True):
    client: bytes
    message: ToRouter
    now_s: float = 0.0


class WorkerSays(Struct, frozen=True):
    worker: WorkerName
    message: ToRouter
    frame: Frame = None
    num_bytes: int = 0
    """Of the frame."""
    now_s: float = 0.0


class WorkerDied(Struct, frozen=True):
    """A worker's process ended; `by_sigkill` says that somebody outside ended it."""

    worker: WorkerName
    how: str = "died"
    by_sigkill: bool = False
    mark: RunningCode | None = None


class WorkerSilent(Struct, frozen=True):
    """A worker that was to be killed for its silence, and what was seen of it before. One that was
    stopped from outside held nothing by itself."""

    worker: WorkerName
    silent_s: float
    was_stopped: bool = False
    mark: RunningCode | None = None


class ClientUnreachable(Struct, frozen=True):
    """A client could not be reached with this."""

    told: TellClient


class RouterTick(Struct, frozen=True):
    """Time passes, several times a second."""

    now_s: float


class StopServer(Struct, frozen=True):
    """Take nothing more, let workers finish what they have."""


class EndServer(Struct, frozen=True):
    """The server ends now: whatever is still owed is answered."""


RouterEvent = (
    ClientSays
    | WorkerSays
    | WorkerDied
    | WorkerSilent
    | ClientUnreachable
    | RouterTick
    | StopServer
    | EndServer
)


class TellWorker(Struct, frozen=True):
    worker: WorkerName
    message: ToWorker


class KillWorker(Struct, frozen=True):
    """Look at its board, kill it, and say WorkerSilent."""

    worker: WorkerName
    silent_s: float


class StartWorker(Struct, frozen=True):
    """Open one more place for a worker and keep it alive."""


class RetireWorker(Struct, frozen=True):
    """Its place closes when it ends: it is not started again."""

    worker: WorkerName


class LogNote(Struct, frozen=True):
    """A line for the server's log."""

    text: str


RouterCommand = TellClient | TellWorker | KillWorker | StartWorker | RetireWorker | LogNote
