"""The client of one env server: the orchestrator and evaluations send rollouts through it."""

import asyncio
import logging
import uuid
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import zmq
from msgspec import Struct
from msgspec.structs import replace
from zmq.asyncio import Context, Socket

from ..errors import PayloadError, ProtocolError
from ..loop.coroutines import FairLoop
from ..loop.watch.rarely import Rarely
from ..payload.writer import SegmentWriter
from ..records.ids import RolloutId, WorkerName
from ..records.payload import PayloadRef
from ..records.rollout import Failed, Scored, Settled
from ..records.task import Split
from ..wire.handshake import Handshake
from ..wire.keys import ClientKeys
from ..wire.messages import (
    MAX_CLIENT_BYTES,
    FrameTaken,
    FromClient,
    Hello,
    NewPolicy,
    NextTasks,
    Ping,
    Refused,
    Run,
    RunGroup,
    Tasks,
    ToClient,
    Unknown,
    Welcome,
    encode,
    for_client,
    split_frames,
)

log = logging.getLogger(__name__)

HELLO_DEADLINE_S = 120.0
"""A worker may take long to load its environment."""
PING_EVERY_S = 2.0
SILENT_S = 60.0
"""A server sends statistics every second. One that sends nothing for this long is gone."""


class PayloadLanding(Struct, frozen=True):
    """Where a client writes payload that arrives as raw frames. If it `must_land`, a ref to a file is a
    failure, because the file is in a folder of the server that this client cannot open."""

    writer: SegmentWriter | None = None
    must_land: bool = False


class EnvClient:
    """Sends runs and receives answers, which the caller matches to runs. Payload that arrives as a frame
    is written before its Settled is returned. Only then may the worker send more."""

    def __init__(
        self, wire: Socket, address: str, welcome: Welcome, landing: PayloadLanding,
        silent_s: float = SILENT_S,
    ) -> None:  # fmt: skip
        self.env = welcome.env
        self.terms = welcome.terms
        """How the server serves it."""
        self.whole_groups = welcome.whole_groups
        """Whether rollouts of a group must be sent as one RunGroup."""
        self._wire = wire
        self._address = address
        self._landing = landing
        self._silent_s = silent_s
        self._fair = FairLoop()
        self.bad_frames = Rarely()
        self._unanswered: dict[RolloutId, int] = {}
        """The attempts of rollouts that have not settled."""
        self._asked: dict[tuple[int, Split], NextTasks] = {}
        self._policy: NewPolicy | None = None
        self._ends: deque[Settled] = deque()
        """Ends of rollouts that went with a server which was started again."""

    async def send(self, message: FromClient) -> None:
        match message:
            case NextTasks(start=start, split=split):
                self._asked[start, split] = message
            case NewPolicy():
                self._policy = message
        frame = encode(message)
        if len(frame) > MAX_CLIENT_BYTES:
            raise ProtocolError(
                f"its task has {len(frame) / 1e6:.1f} MB, and a message to an env server may have "
                f"{MAX_CLIENT_BYTES >> 20} MB: keep large data in files, and file names in tasks"
            )
        await self._wire.send(frame)

    async def send_runs(self, runs: Sequence[Run]) -> list[Settled]:
        """Send the rollouts of one task: together where the environment needs that, else one by one. A
        task that is too large fails them. Their ends are returned, because no server will send them."""
        messages = [RunGroup.of(runs)] if self.whole_groups else runs
        try:
            for message in messages:
                await self.send(message)
            self._unanswered |= {run.rollout_id: run.attempt for run in runs}
        except ProtocolError as error:
            failed = Failed("env", str(error))
            return [
                Settled(run.rollout_id, run.attempt, WorkerName(""), failed) for run in runs
            ]
        return []

    async def receive(self) -> ToClient:
        """Return the next message. Frames that do not decode are counted and dropped."""
        while not self._ends:
            frames = await self._next_frames()
            try:
                message, frame = split_frames(frames, for_client)
                if not await self._greets_again(message):
                    break
            except ProtocolError as error:
                bad = self.bad_frames
                if bad.add():
                    log.warning(
                        "dropped bad frame %d from '%s': %s", bad.count, self.env, error
                    )
        if self._ends:
            return self._ends.popleft()
        if isinstance(message, Tasks):
            self._asked.pop((message.start, message.split), None)
        if not isinstance(message, Settled):
            return message
        self._unanswered.pop(message.rollout_id, None)
        try:
            return await land(message, None if frame is None else frame.buffer, self._landing)
        finally:
            if frame is not None:
                await self.send(FrameTaken(message.worker, len(frame)))

    async def _greets_again(self, message: ToClient) -> bool:
        """Greet a server that was started again, and return whether this message was about that. What it
        does not know any more fails, or is asked for again."""
        match message:
            case Unknown():
                await self.send(Hello("client"))
            case Welcome(terms=terms, env=env):
                if (env, terms) != (self.env, self.terms):
                    raise ProtocolError(
                        f"the env server at {self._address} was started again with other settings: "
                        "start it as before, and --resume"
                    )
                lost = Failed(
                    "worker", f"the env server at {self._address} was started again"
                )
                self._ends += [
                    Settled(rollout_id, attempt, WorkerName(""), lost)
                    for rollout_id, attempt in self._unanswered.items()
                ]
                self._unanswered.clear()
                for again in (self._policy, *self._asked.values()):
                    if again is not None:
                        await self.send(again)
            case _:
                return False
        return True

    async def _next_frames(self) -> Any:
        """Wait for the next message. A wait that is cancelled takes no message off the socket."""
        await self._fair.breathe()
        is_silent = False
        while True:
            with suppress(zmq.Again):
                return await self._wire.recv_multipart(zmq.NOBLOCK, copy=False)
            if is_silent:
                raise ProtocolError(
                    f"the env server at {self._address} has sent nothing for {self._silent_s:g} s: it "
                    "has ended, or cannot be reached"
                )
            is_silent = not await self._wire.poll(self._silent_s * 1000)


@asynccontextmanager
async def connect(
    address: str, landing: SegmentWriter | None = None, keys: ClientKeys | None = None, *,
    must_land: bool = False, hello_s: float = HELLO_DEADLINE_S, silent_s: float = SILENT_S,
) -> AsyncIterator[EnvClient]:  # fmt: skip
    """Connect to an env server, which must send its welcome within `hello_s`. `landing` writes payload
    of workers that share no file system with this client. With `must_land` all payload has to arrive
    that way. `keys` are for a server that requires them."""
    with Context() as context, context.socket(zmq.DEALER) as wire:
        wire.setsockopt(zmq.IDENTITY, f"client-{uuid.uuid4().hex[:12]}".encode())
        pinging = asyncio.create_task(_ping(wire))
        try:
            with Handshake(wire, "env server", address, keys) as handshake:
                welcome = await _say_hello(wire, handshake, hello_s)
            yield EnvClient(
                wire, address, welcome, PayloadLanding(landing, must_land), silent_s
            )
        finally:
            pinging.cancel()


async def _ping(wire: Socket) -> None:
    """Tell the server that this client is alive, also while it waits for its welcome."""
    while True:
        await asyncio.sleep(PING_EVERY_S)
        await wire.send(encode(Ping()))


async def _say_hello(wire: Socket, handshake: Handshake, limit_s: float) -> Welcome:
    """Say Hello and return the server's welcome, which it sends once it has a worker."""
    has_answered = False

    async def talk() -> Welcome:
        nonlocal has_answered
        # This send never returns if the connection was refused before. The handshake then cancels it.
        await wire.send(encode(Hello("client")))
        while True:
            frame = await wire.recv()
            try:
                message = for_client(frame)
            except ProtocolError:
                raise ProtocolError(handshake.stranger()) from None
            match message:
                case Welcome() as welcome:
                    return welcome
                case Refused(reason):
                    raise ProtocolError(handshake.refusal(reason))
            has_answered = True

    try:
        async with asyncio.timeout(limit_s):
            welcome = await handshake.run(talk())
    except TimeoutError:
        if not has_answered:
            raise ProtocolError(handshake.silence(limit_s)) from None
        raise ProtocolError(
            f"the env server at {handshake.address} answers, but none of its workers has started within "
            f"{limit_s:g} s: their logs say why"
        ) from None
    assert welcome is not None
    return welcome


async def land(
    settled: Settled, frame: memoryview | None, landing: PayloadLanding
) -> Settled:
    """Return the same Settled with a ref that can be opened here. A rollout fails if its columns did not
    arrive or cannot be written. The frame is written as it is, in the thread lane, and never decoded."""
    outcome = settled.outcome
    if not isinstance(outcome, Scored):
        return settled
    try:
        ref = await _write(outcome.ref, frame, landing)
    except PayloadError as error:
        failed = Failed("worker", f"payload of {settled.worker}: {error}")
        return replace(settled, outcome=failed)
    return replace(settled, outcome=replace(outcome, ref=ref))


async def _write(
    ref: PayloadRef, frame: memoryview | None, landing: PayloadLanding
) -> PayloadRef:
    if not ref.is_frame:
        if landing.must_land:
            raise PayloadError(
                f"its server wrote it to {ref.segment} in its own folder; start the server "
                "with '--payload frames', or in the run's payload folder and set "
                "'env.external.shares_payload'"
            )
        return ref
    if frame is None or len(frame) != ref.length:
        arrived = "nothing" if frame is None else f"{len(frame)} bytes"
        raise PayloadError(
            f"{arrived} arrived beside the record instead of {ref.length} bytes"
        )
    if landing.writer is None:
        raise PayloadError(
            "it came as a frame, and this client was given no place to write it to"
        )
    return await landing.writer.append_frame(frame)
