"""Throws away what arrives on a connection without copying it out of the kernel."""

import asyncio
import mmap
import socket
import sys
from collections.abc import Callable

IS_POSSIBLE = sys.platform == "linux"
"""Elsewhere MSG_TRUNC copies."""
MIN_BYTES = 256 << 10
"""Fewer are read and forgotten: that is less work than to set this up."""
MAX_BYTES = 4 << 20
"""What one call throws away."""
WAKE_SHARE = 4
"""The loop is woken when one part in so many of the socket's buffer has arrived: less than what its
window holds when it is empty. A peer sends no more than that, and both would wait for ever."""


class KernelDiscard:
    """Throws away the next `num_bytes` of a socket, then calls `on_end`; sooner if the peer hangs up.

    The transport that owns the socket must not read meanwhile. It has the descriptor registered with
    the loop, so this one waits on a duplicate.
    """

    def __init__(self, sock: socket.socket, num_bytes: int, on_end: Callable[[int], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._sock = socket.fromfd(sock.fileno(), sock.family, sock.type)
        self._asked = self._left = num_bytes
        self._on_end = on_end
        room = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
        self._wake_bytes = max(1, room // WAKE_SHARE)
        self._wake_at(min(num_bytes, self._wake_bytes))
        self._loop.add_reader(self._sock, self._throw)
        self._loop.call_soon(self._throw)  # what is there already may have closed the window

    def _throw(self) -> None:
        if self._sock.fileno() < 0:
            return
        try:
            thrown = self._sock.recv_into(_NOWHERE, min(self._left, MAX_BYTES), socket.MSG_TRUNC)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            thrown = 0  # the transport will say what is wrong
        self._left -= thrown
        if not thrown or not self._left:
            self.close()
            self._on_end(self._asked - self._left)
        elif self._left < self._wake_bytes:
            self._wake_at(self._left)

    def _wake_at(self, num_bytes: int) -> None:
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)

    def close(self) -> None:
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock)
            self._wake_at(1)
            self._sock.close()


_NOWHERE = mmap.mmap(-1, MAX_BYTES)
"""Memory that nothing is ever written to: it has an address, and no pages."""
