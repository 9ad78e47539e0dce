"""A client of one env server: what the orchestrator speaks through."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import zmq
import zmq.asyncio

from ..errors import ProtocolError
from ..payload.writer import SegmentWriter
from ..records.rollout import Settled
from ..wire.messages import (
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

HELLO_DEADLINE_S = 30.0


class EnvClient:
    """Sends runs and reads what comes back; who waits for what is the caller's business.

    Payload that comes as frames is written to `landing` before its Settled is passed on, one at a
    time; only then may its worker send more.
    """

    def __init__(
        self, env: str, wire: Any, landing: SegmentWriter | None, *, whole_groups: bool = False
    ) -> None:
        self.env = env
        self.whole_groups = whole_groups
        self._wire = wire
        self._landing = landing

    async def send(self, message: Run | RunGroup | Cancel | NextTasks | NewPolicy | FrameTaken) -> None:
        await self._wire.send(encode(message))

    async def receive(self) -> ToClient:
        message, frame = split_frames(await self._wire.recv_multipart(copy=False), for_client)
        if not isinstance(message, Settled):
            return message
        try:
            return await land(message, None if frame is None else frame.buffer, self._landing)
        finally:
            if frame is not None:
                await self.send(FrameTaken(message.worker, len(frame)))


@asynccontextmanager
async def connect(address: str, landing: SegmentWriter | None = None) -> AsyncIterator[EnvClient]:
    """A client that the server has welcomed; `landing` is for payload of workers that share no file
    system with it."""
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as wire:
        wire.setsockopt(zmq.IDENTITY, f"client-{uuid.uuid4().hex[:12]}".encode())
        wire.setsockopt(zmq.LINGER, 0)
        wire.connect(address)
        await wire.send(encode(Hello("client", protocol=PROTOCOL)))
        try:
            async with asyncio.timeout(HELLO_DEADLINE_S):
                answer = for_client(await wire.recv())
        except TimeoutError:
            raise ProtocolError(f"no env server answers at {address}") from None
        match answer:
            case Welcome(env=env, whole_groups=whole_groups):
                yield EnvClient(env, wire, landing, whole_groups=whole_groups)
            case Refused(reason=reason):
                raise ProtocolError(f"the env server at {address} refused: {reason}")
            case _:
                raise ProtocolError(f"the env server at {address} did not say welcome")
