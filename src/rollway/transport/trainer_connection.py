"""The trainer's connection to the orchestrator, which is made again whenever it is lost."""

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
    decode_for_trainer,
    encode,
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


class TrainerConnection:
    """Connects to the orchestrator's address, and connects again when a connection is lost.

    Every connection has a new socket and begins with TrainerHello and TrainerWelcome. Messages on their
    way when a connection is lost are lost, too. So the receiver of TrainerWelcome must send again what
    was not answered.
    """

    def __init__(self, context: Any, address: str, keys: ClientKeys | None, patience_s: float) -> None:
        self._context = context
        self._address = address
        self._keys = keys
        self._patience_s = patience_s
        self._socket: Any = None

    async def send(self, message: FromTrainer) -> None:
        """Send a message if there is a connection; without one, do nothing."""
        if self._socket is not None:
            with suppress(zmq.Again):
                await self._socket.send(encode(message), zmq.NOBLOCK)

    async def receive_all(self, on_message: OnMessage) -> Never:
        """Pass every message to `on_message`, until the orchestrator refuses this trainer or cannot be
        reached for `patience_s`."""
        now_s = asyncio.get_running_loop().time
        deadline_s = now_s() + self._patience_s
        while True:
            if await self._receive_until_lost(on_message, deadline_s):
                deadline_s = now_s() + self._patience_s
            await asyncio.sleep(RECONNECT_AFTER_S)

    async def _receive_until_lost(self, on_message: OnMessage, deadline_s: float) -> bool:
        """Connect once, and receive until the connection is lost. Return whether TrainerWelcome came; it
        must come before the deadline."""
        with self._context.socket(zmq.DEALER) as sock:
            self._configure(sock)
            with Handshake(sock, has_keys=self._keys is not None) as handshake:
                sock.connect(self._address)
                self._socket = sock
                try:
                    async with asyncio.timeout_at(deadline_s) as limit:
                        await self._receive_or_refuse(sock, handshake, on_message, limit)
                except TimeoutError:
                    raise ProtocolError(self._describe_silence(handshake)) from None
                finally:
                    self._socket = None
                return limit.when() is None

    async def _receive_or_refuse(
        self, sock: Any, handshake: Handshake, on_message: OnMessage, limit: asyncio.Timeout
    ) -> None:
        """Return once the connection is lost. Raise KeysError if the handshake fails."""
        receiving = asyncio.ensure_future(self._receive(sock, on_message, limit))
        ending = asyncio.ensure_future(handshake.wait_until_lost())
        try:
            await asyncio.wait([receiving, ending], return_when=asyncio.FIRST_COMPLETED)
            if receiving.done():
                receiving.result()
            elif why := ending.result():
                raise KeysError(f"the orchestrator at {self._address} refused: {why}")
        finally:
            receiving.cancel()
            ending.cancel()
            await asyncio.wait([receiving, ending])

    async def _receive(self, sock: Any, on_message: OnMessage, limit: asyncio.Timeout) -> Never:
        await sock.send(encode(TrainerHello()))  # waits forever if the handshake failed
        while True:
            message, frame = decode_for_trainer(await sock.recv_multipart(copy=False))
            match message:
                case TrainerWelcome():
                    limit.reschedule(None)
                case TrainerRefused(reason=reason):
                    raise ProtocolError(f"the orchestrator at {self._address} refused: {reason}")
            await on_message(message, frame)

    def _configure(self, sock: Any) -> None:
        sock.setsockopt(zmq.LINGER, 0)
        sock.setsockopt(zmq.SNDHWM, 0)  # the orchestrator's requests bound the number of answers
        sock.setsockopt(zmq.IPV6, "[" in self._address)
        for option, value in KEEPALIVE.items():
            sock.setsockopt(option, value)
        if self._keys is not None:
            self._keys.secure(sock)

    def _describe_silence(self, handshake: Handshake) -> str:
        if handshake.has_connected:
            found = "something listens there, but it does not answer as a run does"
        else:
            found = "nothing listens there"
        return f"no orchestrator at {self._address}: {found} (waited {self._patience_s:g} s)"
