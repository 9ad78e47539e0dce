"""Sees where a call in a lane's process is, once it takes longer than it should."""

import asyncio
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Self

from ...records.lag import Stall
from ...wire import pipe
from ..watch import stacks
from .server import STACK_SIGNAL

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

    def read(self) -> list[stacks.StackLine]:
        """The last stack written since the last time, empty if none was or no call was running."""
        with suppress(OSError):
            self._text += self._ours.recv(MAX_DUMP_BYTES).decode(errors="replace")
        if not stacks.is_complete(self._text):
            return []
        stack, self._text = stacks.parse_dump(self._text), ""
        return [] if any(line.file == pipe.__file__ for line in stack) else stack

    async def wait(self, timeout_s: float) -> list[stacks.StackLine]:
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


LAST_LOOK_S = 0.2
"""How long a process that is about to be killed gets to say where it is."""


class CallWatch:
    """One call of the process `pid`, looked at from `budget_s` on, ever more seldom.

    A call that ends before costs one timer and nothing else. One that does not is told to `report`.
    """

    def __init__(
        self, pid: int, written: StackPipe, what: str, budget_s: float, report: Callable[[Stall], None]
    ) -> None:
        self._pid = pid
        self._written = written
        self._what = what
        self._budget_s = budget_s
        self._report = report
        self._seen: Counter[stacks.StackLine] = Counter()
        self._entered = ""

    def __enter__(self) -> "CallWatch":
        self._written.read()  # what came too late for the call before
        self._started_s = time.monotonic()
        self._timer = asyncio.get_running_loop().call_later(self._budget_s, self._look)
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        took_s = time.monotonic() - self._started_s
        if took_s < self._budget_s:
            return
        self._note(self._written.read())
        if self._seen:
            line = self._most_seen()
            call = f"{self._what} `{self._entered}`" if self._entered else self._what
            self._report(Stall(line.where, line.function, 1, took_s, took_s, "lane", call))

    def _look(self) -> None:
        self._note(self._written.read())
        self._written.ask()
        elapsed_s = time.monotonic() - self._started_s
        pause_s = max(self._budget_s / 2, elapsed_s / 8)
        self._timer = asyncio.get_running_loop().call_later(pause_s, self._look)

    def _note(self, stack: list[stacks.StackLine]) -> stacks.StackLine | None:
        if not stack:
            return None
        if entered := stacks.find_entry_line(stack):
            self._entered = entered.function
        line = stacks.find_user_line(stack)
        self._seen[line] += 1
        return line

    def _most_seen(self) -> stacks.StackLine:
        ((line, _),) = self._seen.most_common(1)
        return line

    async def last_look(self) -> str:
        """Where a call that will be killed is now, for a message; empty if it cannot be seen."""
        self._note(self._written.read())
        with suppress(ProcessLookupError):
            os.kill(self._pid, STACK_SIGNAL)
        line = self._note(await self._written.wait(LAST_LOOK_S))
        if line is None and self._seen:
            line = self._most_seen()
        return f"{line.where} in {line.function}" if line else ""

    def last_words(self) -> str:
        """Where a process that crashed was, if it could still say so."""
        line = self._note(self._written.read())
        return f"{line.where} in {line.function}" if line else ""
