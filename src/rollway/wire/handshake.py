"""Why a client does not get through to its server, as far as that can be told from outside."""

from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

EVENTS = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
MANY = 3
"""Hang-ups before a handshake is done that are no accident: a server that restarts hangs up once."""
NOT_ACCEPTED = (
    "it does not accept this client's key: put the client's public key ('rollway keys show') into the "
    "folder 'clients' of the server's keys, and restart it"
)
NOT_ITS_KEY = (
    "it hangs up on this client: server.public is not its key, or it has no keys (then connect without)"
)
NO_KEYS_GIVEN = "it hangs up on this client: most likely it requires keys, and none were given"


class Handshake:
    """Listens to a socket's connection; it `has_met` somebody once anything listens there."""

    def __init__(self, wire: Any, *, has_keys: bool) -> None:
        self._wire = wire
        self._has_keys = has_keys
        self._monitor = wire.get_monitor_socket(EVENTS)
        self.has_met = False

    async def refused(self) -> str:
        """Why the server will not speak to this client. Waits for as long as there is no such reason."""
        while not (why := await self.ended()):
            pass
        return why

    async def ended(self) -> str:
        """Why the server will not speak to this client; or nothing, once a connection is lost that was
        good. What was on its way then is lost, too."""
        hang_ups, is_good = 0, False
        while hang_ups < MANY:
            match (await recv_monitor_message(self._monitor))["event"]:
                case zmq.EVENT_CONNECTED:
                    self.has_met = True
                case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    is_good = True
                case zmq.EVENT_DISCONNECTED if is_good:
                    return ""
                case zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                    return NOT_ACCEPTED
                case zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                    break  # the socket tries no more
                case zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                    hang_ups += 1
        return NOT_ITS_KEY if self._has_keys else NO_KEYS_GIVEN

    def __enter__(self) -> "Handshake":
        return self

    def __exit__(self, *_: object) -> None:
        self._wire.disable_monitor()
        self._monitor.close(linger=0)
