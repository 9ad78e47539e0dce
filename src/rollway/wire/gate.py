"""The gate of a server with keys: decides for every connection, before anything of it is read."""

import logging
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message
from zmq.utils.z85 import decode

from .keys import ServerKeys

log = logging.getLogger(__name__)

ASKED_AT = "inproc://zeromq.zap.01"
"""Where ZeroMQ asks (its RFC 27)."""
PROTOCOL_VERSION = b"1.0"
REFUSALS = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


class Gate:
    """Lets in whoever proves to hold one of the accepted keys. Open it before the socket is bound."""

    def __init__(self, context: Any, keys: ServerKeys) -> None:
        self._accepted = frozenset(decode(key) for key in keys.clients)
        self._asked = context.socket(zmq.REP)
        self._asked.setsockopt(zmq.LINGER, 0)
        self._asked.bind(ASKED_AT)

    async def serve(self) -> None:
        """Answer until cancelled. Who asks is ZeroMQ itself, so questions are well formed."""
        while True:
            _, request, _, _, _, mechanism, *credentials = await self._asked.recv_multipart()
            ok = mechanism == b"CURVE" and credentials[0] in self._accepted
            status, text = (b"200", b"") if ok else (b"400", b"this key is not accepted")
            await self._asked.send_multipart([PROTOCOL_VERSION, request, status, text, b"", b""])

    def __enter__(self) -> "Gate":
        return self

    def __exit__(self, *_: object) -> None:
        self._asked.close()


async def count_refused(monitor: Any) -> None:
    """Counts connections that came to nothing; says so at first, then ever more seldom."""
    num_refused = 0
    while True:
        event = await recv_monitor_message(monitor)
        num_refused += 1
        if num_refused & (num_refused - 1) == 0:
            log.warning("refused connection %d: %s", num_refused, _why(event["event"]))


def _why(event: int) -> str:
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return "a key that is not accepted"
    return "no key, or one for another server"
