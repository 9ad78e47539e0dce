"""Says which connections to a server with keys are accepted, and counts the others."""

import logging
from collections.abc import Iterable

import zmq
from zmq.asyncio import Socket
from zmq.utils.monitor import recv_monitor_message

log = logging.getLogger(__name__)

REFUSALS = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


class AcceptedKeys:
    """Tells pyzmq's authenticator which clients have a key that a server accepts."""

    def __init__(self, keys: Iterable[bytes]) -> None:
        self._keys = frozenset(keys)

    def callback(self, domain: str, key: bytes) -> bool:
        return key in self._keys


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
