"""The env server's protocol: what client, router and worker say to each other.

Every message is one msgpack frame. A Settled whose columns do not lie on a shared file system has a
raw frame behind it: the blob, which nobody decodes on its way. `PROTOCOL` is checked in Hello; a peer
of another version is told so and dropped.
"""

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from ..errors import ProtocolError
from ..records.ids import PolicyVersion, RolloutId, WorkerName
from ..records.lag import ProcessStats
from ..records.rollout import Settled
from ..records.task import Task
from ..records.turn import Sampling

PROTOCOL = 3

Split = Literal["train", "eval"]
Phase = Literal["starting", "engine", "env", "tool", "update", "scoring", "committing"]


class Hello(Struct, frozen=True, tag="hello"):
    """A client or worker introduces itself; a worker offers `credits` rollouts at a time, and says
    whether its environment needs all rollouts of a group in one place."""

    name: str
    credits: int = 0
    protocol: int = PROTOCOL
    whole_groups: bool = False


class Welcome(Struct, frozen=True, tag="welcome"):
    """The router's answer to a client's Hello, once it has a worker: only workers know the environment.
    With `whole_groups` the client sends RunGroup instead of Run."""

    env: str
    workers: int
    protocol: int = PROTOCOL
    whole_groups: bool = False


class Refused(Struct, frozen=True, tag="refused"):
    """The router will not serve this peer."""

    reason: str


class NextTasks(Struct, frozen=True, tag="next_tasks"):
    """Send `count` tasks from position `start` of the environment's task order."""

    start: int
    count: int
    split: Split = "train"


class Tasks(Struct, frozen=True, tag="tasks"):
    """The tasks from `start`; fewer than asked for when the environment has no more."""

    start: int
    tasks: tuple[Task, ...]
    exhausted: bool = False
    error: str = ""
    split: Split = "train"


class Run(Struct, frozen=True, tag="run"):
    """Run one rollout. The task travels along, so that any worker can run it. A client chooses ids that
    differ among its own; towards workers the router makes them unique in the server."""

    rollout_id: RolloutId
    attempt: int
    task: Task
    sampling: Sampling
    version: PolicyVersion


class RunGroup(Struct, frozen=True, tag="run_group"):
    """Run these rollouts of one task in one worker: they share tools, or are scored together. Each
    settles on its own."""

    runs: Annotated[tuple[Run, ...], Meta(min_length=1)]


class Cancel(Struct, frozen=True, tag="cancel"):
    """Stop a rollout; it settles as Cancelled unless it has settled already."""

    rollout_id: RolloutId
    reason: str


class Ping(Struct, frozen=True, tag="ping"):
    """A client is there. One that is silent for long is taken for gone, and its rollouts end."""


class Drain(Struct, frozen=True, tag="drain"):
    """Finish what you have, take nothing more, then end."""


class Drained(Struct, frozen=True, tag="drained"):
    """A worker that was told to has finished: nothing follows, it ends."""


class RolloutProgress(Struct, frozen=True):
    """Where a running rollout is: its phase, since when, and how far it got."""

    rollout_id: RolloutId
    phase: Phase
    since_s: float
    """Seconds in this phase."""
    num_turns: int
    num_tokens: int


class Progress(Struct, frozen=True, tag="progress"):
    """Rollouts of one worker, those that are longest in their phase first; at most one a second."""

    worker: WorkerName
    rollouts: tuple[RolloutProgress, ...]


class NewPolicy(Struct, frozen=True, tag="new_policy"):
    """The engine now samples from `version`."""

    version: PolicyVersion


class FrameTaken(Struct, frozen=True, tag="frame_taken"):
    """`num_bytes` of raw frames of `worker` are written or refused: it may send as many more."""

    worker: WorkerName
    num_bytes: int


class Stats(Struct, frozen=True, tag="stats"):
    """What one process of the server says of itself."""

    stats: ProcessStats


class WorkerLost(Struct, frozen=True, tag="worker_lost"):
    """A worker died; `num_moved` rollouts run again elsewhere, `num_failed` have settled as failed."""

    worker: WorkerName
    num_moved: int
    num_failed: int


ToRouter = (
    Hello | NextTasks | Tasks | Run | RunGroup | Cancel | Ping | NewPolicy | FrameTaken | Settled
    | Progress | Stats | Drained
)  # fmt: skip
ToWorker = Run | RunGroup | Cancel | Drain | NextTasks | NewPolicy | FrameTaken
ToClient = Welcome | Refused | Tasks | Settled | Progress | Stats | WorkerLost

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


M = TypeVar("M")


def split_frames(frames: Sequence[Any], decode: Callable[[memoryview], M]) -> tuple[M, Any]:
    """A message as it came from a ZMQ socket without a copy: the header, decoded, and the raw frame
    beside it or None. Only a Settled may have one."""
    if not 1 <= len(frames) <= 2:
        raise ProtocolError(f"a message of {len(frames)} frames; it has a header and at most one more")
    message = decode(frames[0].buffer)
    if len(frames) == 1:
        return message, None
    if not isinstance(message, Settled):
        raise ProtocolError(f"a raw frame of {len(frames[1])} bytes beside {type(message).__name__}")
    return message, frames[1]


def for_router(frame: bytes | memoryview) -> ToRouter:
    message: ToRouter = _decode(_to_router, frame)
    return message


def for_worker(frame: bytes | memoryview) -> ToWorker:
    message: ToWorker = _decode(_to_worker, frame)
    return message


def for_client(frame: bytes | memoryview) -> ToClient:
    message: ToClient = _decode(_to_client, frame)
    return message
