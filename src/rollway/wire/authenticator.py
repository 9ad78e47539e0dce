"""Accepts or refuses every connection to a server with keys, before any message is read."""

import logging
from collections.abc import Iterable

import zmq
from zmq.asyncio import Socket
from zmq.utils.monitor import recv_monitor_message
from zmq.utils.z85 import decode

log = logging.getLogger(__name__)

ZAP_ADDRESS = "inproc://zeromq.zap.01"
"""The address at which ZeroMQ asks whether to accept a connection (its RFC 27)."""
PROTOCOL_VERSION = b"1.0"
REFUSALS = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


async def authenticate(requests: Socket, keys: Iterable[bytes]) -> None:
    """Accept clients that prove to hold one of these keys. `requests` is a socket at ZAP_ADDRESS, bound
    before the server's. ZeroMQ itself asks there, so its requests are well formed."""
    accepted = frozenset(decode(key) for key in keys)
    while True:
        _, request, _, _, _, mechanism, *credentials = await requests.recv_multipart()
        ok = mechanism == b"CURVE" and credentials[0] in accepted
        status, text = (b"200", b"") if ok else (b"400", b"this key is not accepted")
        await requests.send_multipart([PROTOCOL_VERSION, request, status, text, b"", b""])


async def count_refused(monitor: Socket) -> None:
    """Count refused connections. Log the 1st, 2nd, 4th, 8th and so on."""
    num_refused = 0
    while True:
        event = await recv_monitor_message(monitor)
        num_refused += 1
        if num_refused.bit_count() == 1:
            log.warning("refused connection %d: %s", num_refused, _reason(event["event"]))


def _reason(event: int) -> str:
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return "a key that is not accepted"
    return "no key, or one for another server"
