"""A trainer's connection to the orchestrator, made anew whenever it is lost."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Never

import zmq

from ..errors import KeysError, ProtocolError
from ..wire.handshake import Handshake
from ..wire.keys import ClientKeys
from .messages import (
    FromTrainer,
    ToTrainer,
    TrainerHello,
    TrainerRefused,
    TrainerWelcome,
    encode,
    for_trainer,
)

AGAIN_S = 0.2
"""Between the loss of a connection and the next."""
KEEPALIVE = {
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 30,
    zmq.TCP_KEEPALIVE_INTVL: 10,
    zmq.TCP_KEEPALIVE_CNT: 3,
}
"""A machine that vanished without a word is noticed within a minute."""

Hearer = Callable[[ToTrainer, Any], Awaitable[None]]
"""Takes a message and the raw frame behind it, or None."""


class TrainerConnection:
    """Every connection begins with TrainerHello and TrainerWelcome, on a socket of its own: what was on its way on the
    last one is gone, so whoever hears TrainerWelcome says again what was not answered."""

    def __init__(self, context: Any, address: str, keys: ClientKeys | None, patience_s: float) -> None:
        self._context = context
        self._address = address
        self._keys = keys
        self._patience_s = patience_s
        self._wire: Any = None

    async def send(self, message: FromTrainer) -> None:
        """Say something on the connection there is; without one it is not said."""
        if self._wire is not None:
            with suppress(zmq.Again):
                await self._wire.send(encode(message), zmq.NOBLOCK)

    async def talk(self, hear: Hearer) -> Never:
        """Pass on what the orchestrator says, until there is nobody for `patience_s`, or it refuses."""
        now_s = asyncio.get_running_loop().time
        deadline_s = now_s() + self._patience_s
        while True:
            if await self._connection(hear, deadline_s):
                deadline_s = now_s() + self._patience_s
            await asyncio.sleep(AGAIN_S)

    async def _connection(self, hear: Hearer, deadline_s: float) -> bool:
        """One connection, until it is lost. Whether there was a TrainerWelcome, which must come in "
        "time."""
        has_keys = self._keys is not None
        with self._context.socket(zmq.DEALER) as wire:
            self._prepare(wire)
            with Handshake(wire, has_keys=has_keys) as handshake:
                wire.connect(self._address)
                self._wire = wire
                try:
                    async with asyncio.timeout_at(deadline_s) as limit:
                        await self._until_lost(wire, handshake, hear, limit)
                except TimeoutError:
                    raise ProtocolError(self._nobody(handshake)) from None
                finally:
                    self._wire = None
                return limit.when() is None

    async def _until_lost(
        self, wire: Any, handshake: Handshake, hear: Hearer, limit: asyncio.Timeout
    ) -> None:
        hearing = asyncio.ensure_future(self._listen(wire, hear, limit))
        ended = asyncio.ensure_future(handshake.ended())
        try:
            await asyncio.wait([hearing, ended], return_when=asyncio.FIRST_COMPLETED)
            if hearing.done():
                hearing.result()
            elif why := ended.result():
                raise KeysError(f"the orchestrator at {self._address} refused: {why}")
        finally:
            hearing.cancel()
            ended.cancel()
            await asyncio.wait([hearing, ended])

    async def _listen(self, wire: Any, hear: Hearer, limit: asyncio.Timeout) -> Never:
        await wire.send(encode(TrainerHello()))  # for ever, if the connection was refused before
        while True:
            message, frame = for_trainer(await wire.recv_multipart(copy=False))
            match message:
                case TrainerWelcome():
                    limit.reschedule(None)
                case TrainerRefused(reason=reason):
                    raise ProtocolError(f"the orchestrator at {self._address} refused: {reason}")
            await hear(message, frame)

    def _prepare(self, wire: Any) -> None:
        wire.setsockopt(zmq.LINGER, 0)
        wire.setsockopt(zmq.SNDHWM, 0)  # answers to what the orchestrator bounds
        wire.setsockopt(zmq.IPV6, "[" in self._address)
        for option, value in KEEPALIVE.items():
            wire.setsockopt(option, value)
        if self._keys is not None:
            self._keys.secure(wire)

    def _nobody(self, handshake: Handshake) -> str:
        met = "something answers there, but says no welcome" if handshake.has_met else "nobody is there"
        return f"no orchestrator at {self._address}: {met} ({self._patience_s:g} s)"
