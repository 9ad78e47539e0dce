"""Binds a port before anything slow is done, so that a port in use is reported at once."""

import socket

from ...errors import PortError


def bind_port(key: str, host: str, port: int | None) -> socket.socket:
    """Return a socket bound to the port that the run file's `key` names; None binds any free port."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port or 0))
    except OSError as error:
        sock.close()
        raise PortError(
            f"'{key}' = {port} cannot be bound at {host}: {error.strerror or error}; choose another port"
        ) from None
    return sock
