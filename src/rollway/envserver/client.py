"""A client of one env server: what the orchestrator speaks through."""

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import zmq
import zmq.asyncio

from ..errors import KeysError, ProtocolError
from ..loop.seldom import is_news
from ..payload.writer import SegmentWriter
from ..records.rollout import Settled
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
    Refused,
    Run,
    RunGroup,
    ToClient,
    Welcome,
    encode,
    for_client,
    split_frames,
)
from .landing import land

log = logging.getLogger(__name__)

HELLO_DEADLINE_S = 30.0


class EnvClient:
    """Sends runs and reads what comes back; who waits for what is the caller's business.

    Payload that comes as frames is written to `landing` before its Settled is passed on, one at a
    time; only then may its worker send more.
    """

    def __init__(
        self, env: str, wire: Any, landing: SegmentWriter | None, *,
        must_land: bool = False, whole_groups: bool = False,
    ) -> None:  # fmt: skip
        self.env = env
        self.whole_groups = whole_groups
        """Whether rollouts of a group must be sent as one RunGroup."""
        self._wire = wire
        self._landing = landing
        self._must_land = must_land
        self.num_bad = 0

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
            frames = await self._wire.recv_multipart(copy=False)
            try:
                message, frame = split_frames(frames, for_client)
                break
            except ProtocolError as error:
                self.num_bad += 1
                if is_news(self.num_bad - 1, self.num_bad):
                    log.warning("dropped bad frame %d from '%s': %s", self.num_bad, self.env, error)
                await asyncio.sleep(0)  # a flood must not hold the loop
        if not isinstance(message, Settled):
            return message
        try:
            came = None if frame is None else frame.buffer
            return await land(message, came, self._landing, must_land=self._must_land)
        finally:
            if frame is not None:
                await self.send(FrameTaken(message.worker, len(frame)))


@asynccontextmanager
async def connect(
    address: str, landing: SegmentWriter | None = None, keys: ClientKeys | None = None, *,
    must_land: bool = False,
) -> AsyncIterator[EnvClient]:  # fmt: skip
    """A client that the server has welcomed; `landing` is for payload of workers that share no file
    system with it, `keys` for a server that requires them. With `must_land` a ref to a file of the
    server's is a failure: nobody here could open it."""
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as wire:
        wire.setsockopt(zmq.IDENTITY, f"client-{uuid.uuid4().hex[:12]}".encode())
        wire.setsockopt(zmq.LINGER, 0)
        wire.setsockopt(zmq.IPV6, "[" in address)
        if keys is not None:
            keys.secure(wire)
        with Handshake(wire, has_keys=keys is not None) as handshake:
            wire.connect(address)
            await wire.send(encode(Hello("client", protocol=PROTOCOL)))
            answer = await _answer(wire, handshake, address)
        match answer:
            case Welcome(env=env, whole_groups=whole_groups):
                yield EnvClient(env, wire, landing, must_land=must_land, whole_groups=whole_groups)
            case Refused(reason=reason):
                raise ProtocolError(f"the env server at {address} refused: {reason}")
            case _:
                raise ProtocolError(f"the env server at {address} did not say welcome")


async def _answer(wire: Any, handshake: Handshake, address: str) -> ToClient:
    """What the server says to Hello, or why it says nothing."""
    answered = asyncio.ensure_future(wire.recv())
    refused = asyncio.ensure_future(handshake.refused())
    try:
        await asyncio.wait(
            [answered, refused], timeout=HELLO_DEADLINE_S, return_when=asyncio.FIRST_COMPLETED
        )
        if answered.done():
            return for_client(answered.result())
        if refused.done():
            raise KeysError(f"the env server at {address} refused: {refused.result()}")
        met = "something answers there, but says no welcome" if handshake.has_met else "nobody is there"
        raise ProtocolError(f"no env server at {address}: {met} ({HELLO_DEADLINE_S:g} s)")
    finally:
        answered.cancel()
        refused.cancel()
