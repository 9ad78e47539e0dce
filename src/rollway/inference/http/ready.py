"""Calls the readers of sockets that have received something: a few in each round of the loop.

When thousands of replies arrive together, a loop that reads all of them in one round does nothing else
meanwhile, and then all their rollouts go on in the next round. So the sockets are gathered in an epoll
of their own, which is one descriptor for the loop. What is not read in this round waits in the kernel.
"""

import asyncio
import select
from collections.abc import Callable
from weakref import WeakKeyDictionary

MAX_AT_ONCE = 4
"""Sockets that are read in one round of the loop. What follows a small reply takes a third of a
millisecond."""


class ReadySockets:
    """The sockets of one event loop that wait for something to read."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._readers: dict[int, Callable[[], None]] = {}
        self._epoll = select.epoll() if hasattr(select, "epoll") else None
        if self._epoll is not None:
            self._loop.add_reader(self._epoll, self._read_some)

    def watch(self, fd: int, read: Callable[[], None]) -> None:
        """Call `read` whenever there is something to read, or the peer has closed the connection."""
        if self._epoll is None:
            self._loop.add_reader(fd, read)
        elif fd not in self._readers:
            self._epoll.register(fd, select.EPOLLIN)
        self._readers[fd] = read

    def unwatch(self, fd: int) -> None:
        if self._readers.pop(fd, None) is None:
            return
        if self._epoll is None:
            self._loop.remove_reader(fd)
        else:
            self._epoll.unregister(fd)

    def _read_some(self) -> None:
        assert self._epoll is not None
        for fd, _ in self._epoll.poll(0, MAX_AT_ONCE):
            if (read := self._readers.get(fd)) is not None:
                read()


_by_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, ReadySockets] = WeakKeyDictionary()


def ready_sockets() -> ReadySockets:
    """Return the sockets of the running loop."""
    loop = asyncio.get_running_loop()
    if loop not in _by_loop:
        _by_loop[loop] = ReadySockets()
    return _by_loop[loop]
