"""The trainer's connection to the orchestrator, which is made again whenever it is lost."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Never

import zmq
from zmq.asyncio import Context, Socket

from ..errors import ProtocolError
from ..wire.handshake import Handshake
from ..wire.keys import ClientKeys
from ..wire.messages import encode
from .messages import (
    FromTrainer,
    RefusedByOrchestrator,
    ToTrainer,
    TrainerHello,
    TrainerWelcome,
    decode_for_trainer,
)

RECONNECT_AFTER_S = 0.2
KEEPALIVE = {
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 30,
    zmq.TCP_KEEPALIVE_INTVL: 10,
    zmq.TCP_KEEPALIVE_CNT: 3,
}
"""A machine that disappears without closing its connections is noticed within a minute."""

OnMessage = Callable[[ToTrainer, Any], Awaitable[None]]
"""Takes a message and the raw frame behind it, or None."""


class OrchestratorConnection:
    """Connects to the orchestrator, and connects again when the connection is lost. Messages that were
    on their way are then lost too. Every connection has a new socket and begins with TrainerHello and
    TrainerWelcome. Whoever receives TrainerWelcome must send again what was not answered."""

    def __init__(
        self, context: Context, address: str, keys: ClientKeys | None, patience_s: float
    ) -> None:
        self._context = context
        self._address = address
        self._keys = keys
        self._patience_s = patience_s
        self._wire: Socket | None = None

    async def send(self, message: FromTrainer) -> None:
        """Send a message if there is a connection; without one, do nothing."""
        if self._wire is not None:
            with suppress(zmq.Again):
                await self._wire.send(encode(message), zmq.NOBLOCK)

    async def receive_all(self, on_message: OnMessage) -> Never:
        """Pass on every message, until the orchestrator refuses or is out of reach for `patience_s`."""
        now_s = asyncio.get_running_loop().time
        deadline_s = now_s() + self._patience_s
        while True:
            if await self._receive_until_lost(on_message, deadline_s):
                deadline_s = now_s() + self._patience_s
            await asyncio.sleep(RECONNECT_AFTER_S)

    async def _receive_until_lost(self, on_message: OnMessage, deadline_s: float) -> bool:
        """Receive on one connection until it is lost. Return whether TrainerWelcome came."""
        with self._context.socket(zmq.DEALER) as wire:
            # no limit: the orchestrator's requests bound the number of answers
            wire.setsockopt(zmq.SNDHWM, 0)
            for option, value in KEEPALIVE.items():
                wire.setsockopt(option, value)
            with Handshake(wire, "orchestrator", self._address, self._keys) as handshake:
                self._wire = wire
                try:
                    async with asyncio.timeout_at(deadline_s) as limit:
                        talk = _talk(wire, handshake, on_message, limit)
                        await handshake.run(talk, until_lost=True)
                except TimeoutError:
                    raise ProtocolError(handshake.silence(self._patience_s)) from None
                finally:
                    self._wire = None
                return limit.when() is None


async def _talk(
    wire: Socket, handshake: Handshake, on_message: OnMessage, limit: asyncio.Timeout
) -> Never:
    """Say TrainerHello and receive messages. The answer lifts the time limit."""
    await wire.send(encode(TrainerHello()))  # waits forever if the handshake failed
    while True:
        message, frame = decode_for_trainer(await wire.recv_multipart(copy=False))
        match message:
            case TrainerWelcome():
                limit.reschedule(None)
            case RefusedByOrchestrator(reason):
                raise ProtocolError(handshake.refusal(reason))
        await on_message(message, frame)
