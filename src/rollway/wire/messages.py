"""The env server's protocol: what client, router and worker say to each other.

Every message is one msgpack frame. `PROTOCOL` is checked in Hello; a peer of another version is told
so and dropped.
"""

from typing import Any

import msgspec
from msgspec import Struct

from ..errors import ProtocolError
from ..records.ids import PolicyVersion, RolloutId, WorkerName
from ..records.lag import ProcessStats
from ..records.rollout import Settled
from ..records.task import Task
from ..records.turn import Sampling

PROTOCOL = 1


class Hello(Struct, frozen=True, tag="hello"):
    """A client or worker introduces itself; a worker offers `credits` rollouts at a time."""

    name: str
    credits: int = 0
    protocol: int = PROTOCOL


class Welcome(Struct, frozen=True, tag="welcome"):
    """The router's answer to a client's Hello."""

    env: str
    workers: int
    protocol: int = PROTOCOL


class Refused(Struct, frozen=True, tag="refused"):
    """The router will not serve this peer."""

    reason: str


class NextTasks(Struct, frozen=True, tag="next_tasks"):
    """Send `count` tasks from position `start` of the environment's task order."""

    start: int
    count: int


class Tasks(Struct, frozen=True, tag="tasks"):
    """The tasks from `start`; fewer than asked for when the environment has no more."""

    start: int
    tasks: tuple[Task, ...]
    exhausted: bool = False
    error: str = ""


class Run(Struct, frozen=True, tag="run"):
    """Run one rollout. The task travels along, so that any worker can run it."""

    rollout_id: RolloutId
    attempt: int
    task: Task
    sampling: Sampling
    version: PolicyVersion


class Cancel(Struct, frozen=True, tag="cancel"):
    """Stop a rollout; it settles as Cancelled unless it has settled already."""

    rollout_id: RolloutId
    reason: str


class NewPolicy(Struct, frozen=True, tag="new_policy"):
    """The engine now samples from `version`."""

    version: PolicyVersion


class Stats(Struct, frozen=True, tag="stats"):
    """What one process of the server says of itself."""

    stats: ProcessStats


class WorkerLost(Struct, frozen=True, tag="worker_lost"):
    """A worker died; `num_moved` rollouts run again elsewhere, `num_failed` have settled as failed."""

    worker: WorkerName
    num_moved: int
    num_failed: int


ToRouter = Hello | NextTasks | Tasks | Run | Cancel | NewPolicy | Settled | Stats
ToWorker = Run | Cancel | NextTasks | NewPolicy
ToClient = Welcome | Refused | Tasks | Settled | Stats | WorkerLost

_encoder = msgspec.msgpack.Encoder()
_to_router: msgspec.msgpack.Decoder[ToRouter] = msgspec.msgpack.Decoder(ToRouter)
_to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
_to_client: msgspec.msgpack.Decoder[ToClient] = msgspec.msgpack.Decoder(ToClient)


def encode(message: Struct) -> bytes:
    return _encoder.encode(message)


def _decode(decoder: msgspec.msgpack.Decoder[Any], frame: bytes | memoryview) -> Any:
    try:
        return decoder.decode(frame)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ProtocolError(f"bad frame of {len(frame)} bytes: {error}") from None


def for_router(frame: bytes | memoryview) -> ToRouter:
    message: ToRouter = _decode(_to_router, frame)
    return message


def for_worker(frame: bytes | memoryview) -> ToWorker:
    message: ToWorker = _decode(_to_worker, frame)
    return message


def for_client(frame: bytes | memoryview) -> ToClient:
    message: ToClient = _decode(_to_client, frame)
    return message
