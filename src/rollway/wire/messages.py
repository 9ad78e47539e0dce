"""The env server's protocol: what client, router and worker say to each other.

Every message is one msgpack frame. A Settled whose columns do not lie on a shared file system has a
raw frame behind it: the blob, which nobody decodes on its way. `PROTOCOL` is checked in Hello; a peer
of another version is told so and dropped. Numbers have bounds and texts have lengths, checked where a
message is decoded; what only a worker may say is not decoded from a client, and the reverse.
"""

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from ..errors import UNREADABLE, ProtocolError
from ..records.ids import ID_PATTERN, Count, Label, Natural, PolicyVersion, RolloutId, WorkerName
from ..records.lag import ProcessStats
from ..records.rollout import Settled
from ..records.task import Split, Task
from ..records.turn import Sampling

PROTOCOL = 3
MAX_CLIENT_BYTES = 16 << 20
"""A message to a server. Nobody reads more: the connection of a peer that sends more is closed."""
MAX_TASKS = 100_000
MAX_GROUP = 10_000
MAX_REASON = 200
"""Characters of what is said about a bad message: parts of it may be the peer's."""

RolloutLabel = Annotated[RolloutId, Meta(pattern=ID_PATTERN)]
Version = Annotated[PolicyVersion, Meta(ge=0, le=2**53)]
WorkerLabel = Annotated[WorkerName, Meta(max_length=1_000)]
Seconds = Annotated[float, Meta(ge=0)]

Phase = Literal["starting", "engine", "env", "tool", "update", "scoring", "committing"]


class Hello(Struct, frozen=True, tag="hello"):
    """A client or worker introduces itself; a worker offers `credits` rollouts at a time, and says
    whether its environment needs all rollouts of a group in one place."""

    name: Label
    credits: Natural = 0
    protocol: Natural = PROTOCOL
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

    start: Natural
    count: Annotated[int, Meta(ge=1, le=MAX_TASKS)]
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

    rollout_id: RolloutLabel
    attempt: Count
    task: Task
    sampling: Sampling
    version: Version
    queued_s: Seconds = 0.0
    """How long the router has kept it; only the router knows."""


class RunGroup(Struct, frozen=True, tag="run_group"):
    """Run these rollouts of one task in one worker: they share tools, or are scored together. Each
    settles on its own."""

    runs: Annotated[tuple[Run, ...], Meta(min_length=1, max_length=MAX_GROUP)]


class Cancel(Struct, frozen=True, tag="cancel"):
    """Stop a rollout; it settles as Cancelled unless it has settled already."""

    rollout_id: RolloutLabel
    reason: Label


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


class WorkerProgress(Struct, frozen=True, tag="progress"):
    """Rollouts of one worker, those that are longest in their phase first; at most one a second."""

    worker: WorkerName
    rollouts: tuple[RolloutProgress, ...]


class NewPolicy(Struct, frozen=True, tag="new_policy"):
    """The engine now samples from `version`."""

    version: Version


class FrameTaken(Struct, frozen=True, tag="frame_taken"):
    """`num_bytes` of raw frames of `worker` are written or refused: it may send as many more."""

    worker: WorkerLabel
    num_bytes: Natural


class ServerStats(Struct, frozen=True, tag="stats"):
    """What one process of the server says of itself."""

    stats: ProcessStats


class WorkerLost(Struct, frozen=True, tag="worker_lost"):
    """A worker died; `num_moved` rollouts run again elsewhere, `num_failed` have settled as failed."""

    worker: WorkerName
    num_moved: int
    num_failed: int


class _PassedTask(Task, frozen=True, omit_defaults=True):
    """A task on its way through the router, which builds no objects of what only workers need."""

    answer: msgspec.Raw = msgspec.Raw(b"\xc0")
    info: msgspec.Raw = msgspec.Raw(b"\x80")  # type: ignore[assignment]


class _PassedRun(Run, frozen=True, tag="run"):
    task: _PassedTask


class _PassedGroup(RunGroup, frozen=True, tag="run_group"):
    runs: Annotated[tuple[_PassedRun, ...], Meta(min_length=1, max_length=MAX_GROUP)]


class _RunHead(Struct, frozen=True, tag="run"):
    """Whose rollout it is, where the rest of a Run cannot be read."""

    rollout_id: RolloutId
    attempt: int


class _GroupHead(Struct, frozen=True, tag="run_group"):
    runs: tuple[_RunHead, ...]


FromClient = Hello | NextTasks | Run | RunGroup | Cancel | Ping | NewPolicy | FrameTaken
FromWorker = Hello | Tasks | Settled | WorkerProgress | ServerStats | Drained
ToRouter = FromClient | FromWorker
ToWorker = Run | RunGroup | Cancel | Drain | NextTasks | NewPolicy | FrameTaken
ToClient = Welcome | Refused | Tasks | Settled | WorkerProgress | ServerStats | WorkerLost

_encoder = msgspec.msgpack.Encoder()
_from_client: msgspec.msgpack.Decoder[FromClient] = msgspec.msgpack.Decoder(
    Hello | NextTasks | _PassedRun | _PassedGroup | Cancel | Ping | NewPolicy | FrameTaken
)
_from_worker: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)
_heads: msgspec.msgpack.Decoder[_RunHead | _GroupHead] = msgspec.msgpack.Decoder(_RunHead | _GroupHead)
_to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
_to_client: msgspec.msgpack.Decoder[ToClient] = msgspec.msgpack.Decoder(ToClient)


def encode(message: Struct) -> bytes:
    return _encoder.encode(message)


def _decode(decoder: msgspec.msgpack.Decoder[Any], frame: bytes | memoryview) -> Any:
    try:
        return decoder.decode(frame)
    except UNREADABLE as error:
        why = ascii(str(error))[1:-1][:MAX_REASON]
        raise ProtocolError(f"bad frame of {len(frame)} bytes: {why}") from None


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


def from_client(frame: bytes | memoryview) -> FromClient:
    message: FromClient = _decode(_from_client, frame)
    return message


def from_worker(frame: bytes | memoryview) -> FromWorker:
    message: FromWorker = _decode(_from_worker, frame)
    return message


def for_worker(frame: bytes | memoryview) -> ToWorker:
    message: ToWorker = _decode(_to_worker, frame)
    return message


def unread_runs(frame: bytes | memoryview) -> list[tuple[RolloutId, int]]:
    """RolloutLabel and attempt of the rollouts in a frame that `for_worker` could not read: the router passes
    tasks on unread, and every rollout must settle."""
    try:
        head = _decode(_heads, frame)
    except ProtocolError:
        return []
    return [(one.rollout_id, one.attempt) for one in getattr(head, "runs", (head,))]


def for_client(frame: bytes | memoryview) -> ToClient:
    message: ToClient = _decode(_to_client, frame)
    return message
