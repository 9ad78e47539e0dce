"""Claims a port before anything slow is done for it."""

import socket

from ...errors import PortError


def claimed(key: str, host: str, port: int, zero: str) -> socket.socket:
    """A socket bound to the port that the config's `key` names; `zero` says what 0 would mean."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise PortError(
            f"{key} {port} cannot be bound at {host}: {error.strerror or error}; "
            f"choose another, or 0 for {zero}"
        ) from None
    return sock
