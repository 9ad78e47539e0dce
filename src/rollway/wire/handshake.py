"""Connects a client to a server, and finds out why that fails, as far as the client can tell."""

import asyncio
from collections.abc import Coroutine
from typing import Any, Self, TypeVar

import zmq
from zmq.asyncio import Socket
from zmq.utils.monitor import recv_monitor_message

from ..errors import CurveKeysError
from .keys import ClientKeys

T = TypeVar("T")

EVENTS = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
MAX_HANG_UPS = 3
"""This many hang-ups during the handshake are not an accident: a server that restarts hangs up once."""
NOT_ACCEPTED = (
    "it does not accept this client's key: put the client's public key ('rollway keys show') into the "
    "folder 'clients' of the server's keys, and restart it"
)
NOT_ITS_KEY = (
    "it hangs up on this client: server.public is not its key, "
    "or it has no keys (then connect without)"
)
NO_KEYS_GIVEN = (
    "it hangs up on this client: most likely it requires keys, and none were given"
)


class Handshake:
    """Connects a client's socket, and watches whether the server accepts it. Errors call it `server`."""

    def __init__(
        self, wire: Socket, server: str, address: str, keys: ClientKeys | None
    ) -> None:
        self._wire = wire
        self._server = server
        self.address = address
        self._keys = keys
        self._monitor = wire.get_monitor_socket(EVENTS)
        self._has_connected = False

    async def run(
        self, talk: Coroutine[Any, Any, T], *, until_lost: bool = False
    ) -> T | None:
        """Talk to the server and return the result. Raise CurveKeysError if it refuses this client.
        With `until_lost`, return None when an accepted connection is lost, with all messages on it."""
        talking = asyncio.ensure_future(talk)
        watching = asyncio.ensure_future(self._watch(until_lost))
        try:
            await asyncio.wait([talking, watching], return_when=asyncio.FIRST_COMPLETED)
            if talking.done():
                return talking.result()
            if reason := watching.result():
                raise CurveKeysError(self.refusal(reason))
            return None
        finally:
            talking.cancel()
            watching.cancel()
            await asyncio.wait([talking, watching])

    def refusal(self, reason: str) -> str:
        return f"the {self._server} at {self.address} refused: {reason}"

    def stranger(self) -> str:
        return (
            f"what answers at {self.address} is not a rollway {self._server}: correct the address, or "
            "start one there"
        )

    def silence(self, waited_s: float) -> str:
        """Say why no answer came: something else answers at the address, or nothing listens there."""
        found = (
            "something else answers there" if self._has_connected else "nothing listens there"
        )
        return f"no {self._server} at {self.address}: {found} (waited {waited_s:g} s)"

    async def _watch(self, until_lost: bool) -> str:
        num_hang_ups, is_good = 0, False
        while num_hang_ups < MAX_HANG_UPS:
            match (await recv_monitor_message(self._monitor))["event"]:
                case zmq.EVENT_CONNECTED:
                    self._has_connected = True
                case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    num_hang_ups, is_good = 0, True
                case zmq.EVENT_DISCONNECTED if is_good and until_lost:
                    return ""
                case zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                    return NOT_ACCEPTED
                case zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                    break  # the socket does not try again
                case zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                    num_hang_ups += 1
        return NOT_ITS_KEY if self._keys else NO_KEYS_GIVEN

    def __enter__(self) -> Self:
        self._wire.setsockopt(zmq.LINGER, 0)
        self._wire.setsockopt(zmq.IPV6, "[" in self.address)
        if self._keys is not None:
            self._keys.secure(self._wire)
        self._wire.connect(self.address)
        return self

    def __exit__(self, *_: object) -> None:
        self._wire.disable_monitor()
        self._monitor.close(linger=0)
