"""Throws away bytes that arrive on a connection without copying them out of the kernel."""

import mmap
import socket
import sys

IS_POSSIBLE = sys.platform == "linux"
"""On other systems recv with MSG_TRUNC copies the bytes."""
MIN_BYTES = 256 << 10
"""For fewer bytes, setting up a KernelDiscard costs more than reading and ignoring them."""
MAX_BYTES = 4 << 20
"""How many bytes one call throws away at most."""
WAKE_SHARE = 4
"""The loop is woken when a quarter of the socket's receive buffer is full. This must be less than the
TCP window of an empty buffer: the peer never sends more than that window at once, so with a higher mark
the peer and this side would wait for each other forever."""


class KernelDiscard:
    """Throws away the next `num_bytes` of a socket. Nothing else may read from the socket meanwhile."""

    def __init__(self, sock: socket.socket, num_bytes: int) -> None:
        self._sock = sock
        self.num_left = num_bytes
        buffer_bytes = sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
        self._wake_bytes = max(1, buffer_bytes // WAKE_SHARE)
        self._wake_loop_at(min(num_bytes, self._wake_bytes))

    def go_on(self) -> int:
        """Throw away what has arrived, and return how much that was: 0 if the peer has closed the
        connection. Raise BlockingIOError if nothing has arrived."""
        limit = min(self.num_left, MAX_BYTES)
        num_discarded = self._sock.recv_into(_UNUSED, limit, socket.MSG_TRUNC)
        self.num_left -= num_discarded
        if self.num_left < self._wake_bytes:
            # the default is 1: without it the loop would not be woken for the small pieces that follow
            self._wake_loop_at(max(1, self.num_left))
        return num_discarded

    def _wake_loop_at(self, num_bytes: int) -> None:
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)


_UNUSED = mmap.mmap(-1, MAX_BYTES)
"""Memory that recv_into needs and never writes to, so that the kernel never gives it pages."""
