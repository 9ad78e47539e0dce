"""Finds out why a client gets no connection to its server, as far as the client can tell."""

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

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
    "it hangs up on this client: server.public is not its key, or it has no keys (then connect without)"
)
NO_KEYS_GIVEN = "it hangs up on this client: most likely it requires keys, and none were given"


class Handshake:
    """Watches the connection of a client's socket. `has_connected` is set once something listens."""

    def __init__(self, wire: zmq.asyncio.Socket, *, has_keys: bool) -> None:
        self._wire = wire
        self._has_keys = has_keys
        self._monitor = wire.get_monitor_socket(EVENTS)
        self.has_connected = False

    async def wait_until_refused(self) -> str:
        """Wait until the server refuses this client; return the reason."""
        while not (reason := await self.wait_until_lost()):
            pass
        return reason

    async def wait_until_lost(self) -> str:
        """Wait until a good connection is lost, and with it the messages under way; return an empty
        string. If the server refuses this client, return the reason instead."""
        num_hang_ups, is_good = 0, False
        while num_hang_ups < MAX_HANG_UPS:
            match (await recv_monitor_message(self._monitor))["event"]:
                case zmq.EVENT_CONNECTED:
                    self.has_connected = True
                case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    is_good = True
                case zmq.EVENT_DISCONNECTED if is_good:
                    return ""
                case zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                    return NOT_ACCEPTED
                case zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                    break  # the socket does not try again
                case zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                    num_hang_ups += 1
        return NOT_ITS_KEY if self._has_keys else NO_KEYS_GIVEN

    def __enter__(self) -> "Handshake":
        return self

    def __exit__(self, *_: object) -> None:
        self._wire.disable_monitor()
        self._monitor.close(linger=0)
