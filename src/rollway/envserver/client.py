"""A client of one env server: what the orchestrator speaks through."""

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from ..errors import KeysError, PayloadError, ProtocolError
from ..loop.coroutines import FairLoop
from ..loop.watch.rarely import Rarely
from ..payload.store import ON_ITS_WAY
from ..payload.writer import SegmentWriter
from ..records.payload import PayloadRef
from ..records.rollout import Failed, Scored, Settled
from ..wire.handshake import Handshake
from ..wire.keys import ClientKeys
from ..wire.messages import (
    MAX_CLIENT_BYTES,
    PROTOCOL,
    Cancel,
    FrameTaken,
    Hello,
    NewPolicy,
    NextTasks,
    Ping,
    Refused,
    Run,
    RunGroup,
    ToClient,
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
"""A server says something every second, if only how it does. One that does not is gone."""


class EnvClient:
    """Sends runs and reads what comes back; who waits for what is the caller's business.

    Payload that comes as frames is written to `landing` before its Settled is passed on, one at a
    time; only then may its worker send more. With `whole_groups` the environment wants the rollouts of
    a task in one RunGroup.
    """

    def __init__(
        self, env: str, address: str, wire: Any, landing: SegmentWriter | None, *,
        must_land: bool = False, whole_groups: bool = False, silent_s: float = SILENT_S,
    ) -> None:  # fmt: skip
        self.env = env
        self.whole_groups = whole_groups
        """Whether rollouts of a group must be sent as one RunGroup."""
        self._address = address
        self._wire = wire
        self._landing = landing
        self._must_land = must_land
        self._silent_s = silent_s
        self._fair = FairLoop()
        self.bad_frames = Rarely()

    async def send(self, message: Run | RunGroup | Cancel | NextTasks | NewPolicy | FrameTaken) -> None:
        frame = encode(message)
        if len(frame) > MAX_CLIENT_BYTES:
            raise ProtocolError(
                f"a {type(message).__name__} of {len(frame) / 1e6:.1f} MB to '{self.env}': servers take "
                f"{MAX_CLIENT_BYTES >> 20} MB; keep what is large in files, and their names in tasks"
            )
        await self._wire.send(frame)

    async def receive(self) -> ToClient:
        """The next message. What is none is counted and dropped."""
        while True:
            frames = await self._next()
            try:
                message, frame = split_frames(frames, for_client)
                break
            except ProtocolError as error:
                if self.bad_frames.add():
                    count = self.bad_frames.count
                    log.warning("dropped bad frame %d from '%s': %s", count, self.env, error)
        if not isinstance(message, Settled):
            return message
        try:
            came = None if frame is None else frame.buffer
            return await land(message, came, self._landing, must_land=self._must_land)
        finally:
            if frame is not None:
                await self.send(FrameTaken(message.worker, len(frame)))

    async def _next(self) -> Any:
        """The next message. Waiting takes none away, so that one that came too late is not lost."""
        await self._fair.breathe()
        is_silent = False
        while True:
            with suppress(zmq.Again):
                return await self._wire.recv_multipart(zmq.NOBLOCK, copy=False)
            if is_silent:
                raise ProtocolError(
                    f"the env server at {self._address} has said nothing for {self._silent_s:g} s: it "
                    "has ended, or cannot be reached"
                )
            is_silent = not await self._wire.poll(self._silent_s * 1000)


@asynccontextmanager
async def connect(
    address: str, landing: SegmentWriter | None = None, keys: ClientKeys | None = None, *,
    must_land: bool = False, hello_s: float = HELLO_DEADLINE_S, silent_s: float = SILENT_S,
) -> AsyncIterator[EnvClient]:  # fmt: skip
    """A client that the server has welcomed within `hello_s`; `landing` is for payload of workers that
    share no file system with it, `keys` for a server that requires them. With `must_land` a ref to a
    file of the server's is a failure: nobody here could open it."""
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as wire:
        wire.setsockopt(zmq.IDENTITY, f"client-{uuid.uuid4().hex[:12]}".encode())
        wire.setsockopt(zmq.LINGER, 0)
        wire.setsockopt(zmq.IPV6, "[" in address)
        if keys is not None:
            keys.secure(wire)
        pinging = asyncio.create_task(_ping(wire))
        try:
            with Handshake(wire, has_keys=keys is not None) as handshake:
                wire.connect(address)
                welcome = await _answer(wire, handshake, address, hello_s)
            yield EnvClient(
                welcome.env, address, wire, landing,
                must_land=must_land, whole_groups=welcome.whole_groups, silent_s=silent_s,
            )  # fmt: skip
        finally:
            pinging.cancel()


async def _ping(wire: Any) -> None:
    """Say that there is somebody, also while waiting to be welcomed."""
    while True:
        await asyncio.sleep(PING_EVERY_S)
        await wire.send(encode(Ping()))


async def _answer(wire: Any, handshake: Handshake, address: str, limit_s: float) -> Welcome:
    """The server's welcome, or why there is none."""
    heard: list[ToClient] = []
    answered = asyncio.ensure_future(_welcomed(wire, address, heard))
    refused = asyncio.ensure_future(handshake.wait_until_refused())
    try:
        await asyncio.wait([answered, refused], timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        if answered.done():
            return answered.result()
        if refused.done():
            raise KeysError(f"the env server at {address} refused: {refused.result()}")
        if heard:
            raise ProtocolError(
                f"the env server at {address} answers, but none of its workers has started within "
                f"{limit_s:g} s: their logs say why"
            )
        is_there = handshake.has_connected
        met = "something answers there, but says no welcome" if is_there else "nobody is there"
        raise ProtocolError(f"no env server at {address}: {met} ({limit_s:g} s)")
    finally:
        answered.cancel()
        refused.cancel()


async def _welcomed(wire: Any, address: str, heard: list[ToClient]) -> Welcome:
    """The server's welcome, which it gives once it has a worker. What else it says is `heard`."""
    await wire.send(encode(Hello("client", protocol=PROTOCOL)))  # for ever, if it was refused before
    while True:
        match for_client(await wire.recv()):
            case Welcome() as welcome:
                return welcome
            case Refused(reason=reason):
                raise ProtocolError(f"the env server at {address} refused: {reason}")
            case other:
                heard[:] = [other]


async def land(
    settled: Settled, frame: memoryview | None, landing: SegmentWriter | None, *, must_land: bool = False
) -> Settled:
    """The same end with a ref that can be opened here. One whose columns did not arrive, or cannot be
    written, failed. The frame is written as it is, in the thread lane, never decoded. With `must_land`
    columns that stayed in a file of the worker's did not arrive."""
    outcome = settled.outcome
    if not isinstance(outcome, Scored):
        return settled
    try:
        if must_land and outcome.ref.segment != ON_ITS_WAY:
            raise PayloadError(
                f"its server wrote it to {outcome.ref.segment} in a folder of its own; start it with "
                "'--payload frames', or in the run's payload folder and set 'env.shares_payload'"
            )
        ref = await _written(outcome.ref, frame, landing)
    except PayloadError as error:
        failed = Failed("worker", f"payload of {settled.worker}: {error}")
        return msgspec.structs.replace(settled, outcome=failed)
    return msgspec.structs.replace(settled, outcome=msgspec.structs.replace(outcome, ref=ref))


async def _written(
    ref: PayloadRef, frame: memoryview | None, landing: SegmentWriter | None
) -> PayloadRef:
    if ref.segment != ON_ITS_WAY:
        return ref
    if frame is None or len(frame) != ref.length:
        came = "nothing" if frame is None else f"{len(frame)} bytes"
        raise PayloadError(f"{came} arrived beside the record instead of {ref.length} bytes")
    if landing is None:
        raise PayloadError("it came as a frame, and this client was given no place to write it to")
    return await landing.append_frame(frame)
