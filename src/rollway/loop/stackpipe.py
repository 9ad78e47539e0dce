"""Where a parent asks a lane's process for its stack, and reads it."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Self

from ..wire import pipe
from . import stacks

MAX_DUMP_BYTES = 64 << 10


class StackPipe:
    """The parent's end. A stack comes in pieces when it is written by a signal; it counts when whole."""

    def __init__(self, ours: socket.socket, theirs: socket.socket) -> None:
        self._ours = ours
        self._text = ""
        self.their_fd = theirs.fileno()

    @classmethod
    @contextmanager
    def open(cls) -> Iterator[Self]:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.setblocking(False)
            yield cls(ours, theirs)

    def ask(self) -> None:
        with suppress(OSError):
            self._ours.send(b"?")

    def read(self) -> list[stacks.Line]:
        """The last stack written since the last time, empty if none was or no call was running."""
        with suppress(OSError):
            self._text += self._ours.recv(MAX_DUMP_BYTES).decode(errors="replace")
        if not stacks.is_whole(self._text):
            return []
        stack, self._text = stacks.of_dump(self._text), ""
        return [] if any(line.file == pipe.__file__ for line in stack) else stack

    async def wait(self, timeout_s: float) -> list[stacks.Line]:
        """The next stack; empty if it takes too long."""
        loop = asyncio.get_running_loop()
        there = asyncio.Event()
        loop.add_reader(self._ours, there.set)
        try:
            async with asyncio.timeout(timeout_s):
                while not (stack := self.read()):
                    there.clear()
                    await there.wait()
                return stack
        except TimeoutError:
            return []
        finally:
            loop.remove_reader(self._ours)
