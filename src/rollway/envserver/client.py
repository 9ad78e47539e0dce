"""A client of one env server: what the orchestrator speaks through."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import zmq
import zmq.asyncio

from ..errors import ProtocolError
from ..wire.messages import (
    PROTOCOL,
    Cancel,
    Hello,
    NewPolicy,
    NextTasks,
    Refused,
    Run,
    ToClient,
    Welcome,
    encode,
    for_client,
)

HELLO_DEADLINE_S = 30.0


class EnvClient:
    """Sends runs and reads what comes back; who waits for what is the caller's business."""

    def __init__(self, env: str, wire: Any) -> None:
        self.env = env
        self._wire = wire

    async def send(self, message: Run | Cancel | NextTasks | NewPolicy) -> None:
        await self._wire.send(encode(message))

    async def receive(self) -> ToClient:
        return for_client(await self._wire.recv())


@asynccontextmanager
async def connect(address: str) -> AsyncIterator[EnvClient]:
    """A client that the server has welcomed."""
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
            case Welcome(env=env):
                yield EnvClient(env, wire)
            case Refused(reason=reason):
                raise ProtocolError(f"the env server at {address} refused: {reason}")
            case _:
                raise ProtocolError(f"the env server at {address} did not say welcome")
