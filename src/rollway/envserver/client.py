"""A client of one env server: what the orchestrator speaks through."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import zmq
import zmq.asyncio

from ..errors import ProtocolError
from ..loop.turns import Turns
from ..payload.writer import SegmentWriter
from ..records.rollout import Settled
from ..wire.messages import (
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
from .landing import land

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
        self, env: str, whole_groups: bool, address: str, wire: Any, landing: SegmentWriter | None
    ) -> None:
        self.env = env
        self.whole_groups = whole_groups
        self._address = address
        self._wire = wire
        self._landing = landing
        self._turns = Turns()

    async def send(self, message: Run | RunGroup | Cancel | NextTasks | NewPolicy | FrameTaken) -> None:
        await self._wire.send(encode(message))

    async def receive(self) -> ToClient:
        message, frame = split_frames(await self._next(), for_client)
        if not isinstance(message, Settled):
            return message
        try:
            return await land(message, None if frame is None else frame.buffer, self._landing)
        finally:
            if frame is not None:
                await self.send(FrameTaken(message.worker, len(frame)))

    async def _next(self) -> Any:
        """The next message. Waiting takes none away, so that one that came too late is not lost."""
        await self._turns.let_others()
        is_silent = False
        while True:
            with suppress(zmq.Again):
                return await self._wire.recv_multipart(zmq.NOBLOCK, copy=False)
            if is_silent:
                raise ProtocolError(
                    f"the env server at {self._address} has said nothing for {SILENT_S:g} s: it has "
                    "ended, or cannot be reached"
                )
            is_silent = not await self._wire.poll(SILENT_S * 1000)


@asynccontextmanager
async def connect(address: str, landing: SegmentWriter | None = None) -> AsyncIterator[EnvClient]:
    """A client that the server has welcomed; `landing` is for payload of workers that share no file
    system with it."""
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as wire:
        wire.setsockopt(zmq.IDENTITY, f"client-{uuid.uuid4().hex[:12]}".encode())
        wire.setsockopt(zmq.LINGER, 0)
        wire.connect(address)
        await wire.send(encode(Hello("client", protocol=PROTOCOL)))
        pinging = asyncio.create_task(_ping(wire))
        try:
            welcome = await _welcomed(wire, address)
            yield EnvClient(welcome.env, welcome.whole_groups, address, wire, landing)
        finally:
            pinging.cancel()


async def _ping(wire: Any) -> None:
    """Say that there is somebody, also while waiting to be welcomed."""
    while True:
        await asyncio.sleep(PING_EVERY_S)
        await wire.send(encode(Ping()))


async def _welcomed(wire: Any, address: str) -> Welcome:
    """The server's welcome, which it gives once it has a worker; what else it says is for later."""
    is_there = False
    try:
        async with asyncio.timeout(HELLO_DEADLINE_S):
            while True:
                match for_client(await wire.recv()):
                    case Welcome() as welcome:
                        return welcome
                    case Refused(reason=reason):
                        raise ProtocolError(f"the env server at {address} refused: {reason}")
                is_there = True
    except TimeoutError:
        pass
    if is_there:
        raise ProtocolError(
            f"the env server at {address} answers, but none of its workers has started within "
            f"{HELLO_DEADLINE_S:g} s: their logs say why"
        )
    raise ProtocolError(f"no env server answers at {address}")
