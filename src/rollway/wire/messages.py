"""The env server's protocol: the messages between client, router and worker.

Every message is one msgpack frame. A Settled whose columns do not lie on a shared file system is
followed by a raw frame: the blob, which no process decodes on its way. The router checks `PROTOCOL` in
a client's Hello and refuses a client of another version. Numbers have bounds and texts have lengths,
which are checked where a message is decoded. A client's message is decoded only if clients may send
it, and the same holds for workers.
"""

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from ..errors import UNREADABLE, ProtocolError
from ..records.ids import (
    ID_PATTERN,
    Count,
    Label,
    Natural,
    PolicyVersion,
    RolloutId,
    WorkerName,
)
from ..records.lag import ProcessStats
from ..records.rollout import Settled
from ..records.task import Split, Task
from ..records.turn import Sampling

PROTOCOL = 8
MAX_CLIENT_BYTES = 16 << 20
"""The largest message to a server. ZMQ closes the connection of a peer that sends more."""
MAX_TASKS = 100_000
MAX_GROUP = 10_000
MAX_ENGINES = 10_000
MAX_REASON = 200
"""Characters of the reason why a message is bad. The reason may quote the peer."""

RolloutLabel = Annotated[RolloutId, Meta(pattern=ID_PATTERN)]
Version = Annotated[PolicyVersion, Meta(ge=0, le=2**31 - 1)]
Address = Annotated[str, Meta(max_length=1_000)]
WorkerLabel = Annotated[WorkerName, Meta(max_length=1_000)]
Seconds = Annotated[float, Meta(ge=0)]

Phase = Literal[
    "starting", "engine", "env", "tool", "update", "waiting to be scored", "scoring", "closing tools",
    "committing",
]  # fmt: skip


class Hello(Struct, frozen=True, tag="hello"):
    """A client or worker introduces itself. A worker offers to run `credits` rollouts at a time. It says
    whether its environment needs all rollouts of a group in one worker."""

    name: Label
    credits: Natural = 0
    protocol: Natural = PROTOCOL
    whole_groups: bool = False


class Welcome(Struct, frozen=True, tag="welcome"):
    """The router's answer to a client's Hello. It waits for the first worker, because only workers know
    the environment. With `whole_groups` the client sends RunGroup instead of Run."""

    env: str
    workers: int
    protocol: int = PROTOCOL
    whole_groups: bool = False
    terms: dict[str, str] = {}
    """What the server serves, by the keys of a run file. The client compares them with its own."""


class Refused(Struct, frozen=True, tag="refused"):
    """The router will not serve this peer."""

    reason: str


class Unknown(Struct, frozen=True, tag="unknown"):
    """The router does not know this client, which must say Hello again: the server was started again."""


class NextTasks(Struct, frozen=True, tag="next_tasks"):
    """Send `count` tasks from position `start` of the environment's task order."""

    start: Natural
    count: Annotated[int, Meta(ge=1, le=MAX_TASKS)]
    split: Split = "train"


class Tasks(Struct, frozen=True, tag="tasks"):
    """The tasks from `start`: fewer than requested when the environment has no more."""

    start: int
    tasks: tuple[Task, ...]
    exhausted: bool = False
    error: str = ""
    split: Split = "train"


class Run(Struct, frozen=True, tag="run"):
    """Run one rollout. The task travels along, so that any worker can run it. A client's ids differ from
    each other. Before the router passes a run on to a worker, it makes the id unique in the server and
    sets `serial`, `queued_s` and `client`."""

    rollout_id: RolloutLabel
    attempt: Count
    task: Task
    sampling: Sampling
    version: Version
    group: Natural
    """A number that the client chooses: rollouts with the same number share an engine and its cache."""
    serial: Natural = 0
    """The rollout's number in this server, from 1."""
    queued_s: Seconds = 0.0
    """How long the router has kept the rollout."""
    client: Natural = 0
    """The client's number in this server, from 1. Only its own versions apply to its rollouts."""


class GroupMember(Struct, frozen=True):
    """What differs between the runs of a group."""

    rollout_id: RolloutLabel
    attempt: Count
    serial: Natural = 0
    queued_s: Seconds = 0.0


class RunGroup(Struct, frozen=True, tag="run_group"):
    """Run these rollouts of one task in one worker. Each rollout still has its own Settled. The task
    travels once, however many rollouts there are."""

    task: Task
    sampling: Sampling
    version: Version
    group: Natural
    members: Annotated[tuple[GroupMember, ...], Meta(min_length=1, max_length=MAX_GROUP)]
    client: Natural = 0

    @classmethod
    def of(cls, runs: Sequence[Run]) -> "RunGroup":
        """Return the message for runs of one task, which share all but what GroupMember has."""
        first = runs[0]
        members = tuple(
            GroupMember(run.rollout_id, run.attempt, run.serial, run.queued_s) for run in runs
        )
        return RunGroup(
            first.task, first.sampling, first.version, first.group, members, first.client
        )

    @property
    def runs(self) -> tuple[Run, ...]:
        shared = self.task, self.sampling, self.version, self.group
        return tuple(
            Run(
                member.rollout_id,
                member.attempt,
                *shared,
                member.serial,
                member.queued_s,
                self.client,
            )
            for member in self.members
        )


class Cancel(Struct, frozen=True, tag="cancel"):
    """Stop a rollout; it settles as Cancelled unless it has settled already."""

    rollout_id: RolloutLabel
    reason: Label


class Ping(Struct, frozen=True, tag="ping"):
    """A client is alive. The rollouts of a client that is silent for too long are cancelled."""


class Drain(Struct, frozen=True, tag="drain"):
    """The worker must finish the rollouts it has, and then end."""


class Drained(Struct, frozen=True, tag="drained"):
    """The last message of a worker that the router has drained."""


class ReplaceMe(Struct, frozen=True, tag="replace_me"):
    """The worker holds code that refuses to end. It must get no more rollouts, and be replaced once its
    rollouts have ended."""

    reason: Annotated[str, Meta(max_length=MAX_REASON)]


class RolloutProgress(Struct, frozen=True):
    """Where a running rollout is: its phase, for how long, and how many turns it has taken."""

    rollout_id: RolloutId
    phase: Phase
    since_s: float
    """Seconds in this phase."""
    num_turns: int
    num_tokens: int
    num_bytes: int = 0
    """Routes that it has brought so far."""


class RolloutPhases(Struct, frozen=True, tag="progress"):
    """Where the rollouts of one worker are. Sent once a second."""

    worker: WorkerName
    rollouts: tuple[RolloutProgress, ...]


class NewPolicy(Struct, frozen=True, tag="new_policy"):
    """For the rollouts of this client, the engines now sample from `version`, and those in `refused` may
    not be asked."""

    version: Version
    refused: Annotated[tuple[Address, ...], Meta(max_length=MAX_ENGINES)] = ()
    client: Natural = 0
    """The client's number, which the router sets."""


class FrameTaken(Struct, frozen=True, tag="frame_taken"):
    """The client has written or refused `num_bytes` of raw frames, so `worker` may send as many more."""

    worker: WorkerLabel
    num_bytes: Natural


class ServerStats(Struct, frozen=True, tag="stats"):
    """Statistics of one process of the server: lag, memory, rollouts in flight."""

    stats: ProcessStats


class WorkerLost(Struct, frozen=True, tag="worker_lost"):
    """A worker died: `num_moved` of its rollouts run again elsewhere, `num_failed` have failed. `why`
    continues a sentence that begins with its name."""

    worker: WorkerName
    num_moved: int
    num_failed: int
    why: str = "died"

    @property
    def text(self) -> str:
        moved = f"{self.num_moved} of its rollouts run again, {self.num_failed} failed"
        return f"{self.worker} {self.why}: {moved}"


class _PassedTask(Task, frozen=True, omit_defaults=True):
    """A task on its way through the router, which does not decode what only workers need."""

    answer: msgspec.Raw = msgspec.Raw(b"\xc0")
    info: msgspec.Raw = msgspec.Raw(b"\x80")  # type: ignore[assignment]


class _PassedRun(Run, frozen=True, tag="run"):
    task: _PassedTask


class _PassedGroup(RunGroup, frozen=True, tag="run_group"):
    task: _PassedTask


class _RunHead(Struct, frozen=True, tag="run"):
    """What must be read of a Run to settle it, even if its task cannot be read."""

    rollout_id: RolloutId
    attempt: int


class _GroupHead(Struct, frozen=True, tag="run_group"):
    members: tuple[GroupMember, ...]


FromClient = Hello | NextTasks | Run | RunGroup | Cancel | Ping | NewPolicy | FrameTaken
FromWorker = Hello | Tasks | Settled | RolloutPhases | ServerStats | ReplaceMe | Drained
ToRouter = FromClient | FromWorker
ToWorker = Run | RunGroup | Cancel | Drain | NextTasks | NewPolicy | FrameTaken
ToClient = (
    Welcome | Refused | Unknown | Tasks | Settled | RolloutPhases | ServerStats | WorkerLost
)

M = TypeVar("M")


class MessageDecoder(Generic[M]):
    """Decodes the messages of a union. Raises ProtocolError for a frame that holds none of them."""

    def __init__(self, union: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(union)

    def __call__(self, frame: bytes | memoryview) -> M:
        try:
            return self._decoder.decode(frame)
        except UNREADABLE as error:
            why = ascii(str(error))[1:-1][:MAX_REASON]
            raise ProtocolError(f"bad frame of {len(frame)} bytes: {why}") from None


encode = msgspec.msgpack.Encoder().encode
from_client = MessageDecoder[FromClient](
    Hello | NextTasks | _PassedRun | _PassedGroup | Cancel | Ping | NewPolicy | FrameTaken
)
from_worker = MessageDecoder[FromWorker](FromWorker)
for_worker = MessageDecoder[ToWorker](ToWorker)
for_client = MessageDecoder[ToClient](ToClient)
_heads = MessageDecoder[_RunHead | _GroupHead](_RunHead | _GroupHead)


def split_frames(frames: Sequence[Any], decode: Callable[[memoryview], M]) -> tuple[M, Any]:
    """Decode a message received without a copy, and the raw frame that only a Settled may have."""
    match frames:
        case [header]:
            return decode(header.buffer), None
        case [header, raw]:
            message = decode(header.buffer)
            if not isinstance(message, Settled):
                raise ProtocolError(
                    f"a raw frame of {len(raw)} bytes beside {type(message).__name__}"
                )
            return message, raw
    raise ProtocolError(
        f"a message of {len(frames)} frames; it has a header and at most one more"
    )


def unread_runs(frame: bytes | memoryview) -> list[tuple[RolloutId, int]]:
    """Return id and attempt of the rollouts in a frame that `for_worker` could not read. The router
    passes tasks on without reading them, and every rollout must settle."""
    try:
        head = _heads(frame)
    except ProtocolError:
        return []
    runs = head.members if isinstance(head, _GroupHead) else (head,)
    return [(run.rollout_id, run.attempt) for run in runs]
