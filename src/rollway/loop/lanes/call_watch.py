"""Finds out which line a call in a lane's process is at, once the call takes longer than it should."""

import asyncio
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Self

from msgspec import Struct

from ...records.lag import Stall
from ...wire import pipe
from ..watch import stacks
from .server import STACK_SIGNAL

MAX_DUMP_BYTES = 64 << 10


class StackPipe:
    """The parent's end of the socket on which a lane's process shows its stack, piece by piece."""

    def __init__(self, parent_end: socket.socket, child_end: socket.socket) -> None:
        self._socket = parent_end
        self._text = ""
        self.child_fd = child_end.fileno()

    @classmethod
    @contextmanager
    def open(cls) -> Iterator[Self]:
        parent_end, child_end = socket.socketpair()
        with parent_end, child_end:
            parent_end.setblocking(False)
            yield cls(parent_end, child_end)

    def ask(self) -> None:
        with suppress(OSError):
            self._socket.send(b"?")

    def read(self) -> list[stacks.StackLine]:
        """Return the last stack since the previous read; empty if there is none, or no running call."""
        with suppress(OSError):
            self._text += self._socket.recv(MAX_DUMP_BYTES).decode(errors="replace")
        if not stacks.is_complete(self._text):
            return []
        stack, self._text = stacks.parse_dump(self._text), ""
        return [] if any(line.file == pipe.__file__ for line in stack) else stack

    async def wait(self, timeout_s: float) -> list[stacks.StackLine]:
        loop = asyncio.get_running_loop()
        is_readable = asyncio.Event()
        loop.add_reader(self._socket, is_readable.set)
        try:
            async with asyncio.timeout(timeout_s):
                while not (stack := self.read()):
                    is_readable.clear()
                    await is_readable.wait()
                return stack
        except TimeoutError:
            return []
        finally:
            loop.remove_reader(self._socket)


LAST_LOOK_S = 1.0
"""How long a process that is about to be killed gets to show its stack."""


UNNAMED = "call"
"""The label of a lane that has calls of many kinds."""


class CallBudget(Struct, frozen=True):
    """The label of a lane's calls, how long a call may take, and who hears of slower ones."""

    label: str
    budget_s: float = 300.0
    report: Callable[[Stall], None] = lambda stall: None

    def name_of(self, function: Callable[..., object]) -> str:
        """Return what errors call a call: by the lane's label, or by the function's name."""
        if self.label != UNNAMED:
            return f"the {self.label}"
        return f"{function.__module__}.{function.__qualname__}"


class CallWatch:
    """Watches one call of the process `pid`. From the end of its budget on it looks at the call's stack,
    less and less often, and reports the call when it has ended. A faster call costs one timer."""

    def __init__(self, pid: int, stack_pipe: StackPipe, budget: CallBudget) -> None:
        self._pid = pid
        self._stack_pipe = stack_pipe
        self.budget = budget
        self._samples: Counter[stacks.StackLine] = Counter()
        self._entry_function = ""
        self._is_late = False

    def __enter__(self) -> "CallWatch":
        self._stack_pipe.read()  # drop a stack that came too late for the call before
        self._started_s = time.monotonic()
        self._timer = asyncio.get_running_loop().call_later(self.budget.budget_s, self._look)
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        budget, took_s = self.budget, time.monotonic() - self._started_s
        if took_s < budget.budget_s:
            return
        self._sample(self._stack_pipe.read())
        if self._samples:
            line, call = self._most_seen(), budget.label
            if self._entry_function:
                call += f" `{self._entry_function}`"
            where, function = line.where, line.function
            budget.report(
                Stall(where, function, 1, took_s, took_s, "lane", call, self._is_late)
            )

    def _look(self) -> None:
        self._sample(self._stack_pipe.read())
        self._stack_pipe.ask()
        took_s = time.monotonic() - self._started_s
        pause_s = max(self.budget.budget_s / 2, took_s / 8)
        self._timer = asyncio.get_running_loop().call_later(pause_s, self._look)

    def _sample(self, stack: list[stacks.StackLine]) -> stacks.StackLine | None:
        if not stack:
            return None
        if entry := stacks.find_entry_line(stack):
            self._entry_function = entry.function
        line = stacks.find_user_line(stack)
        self._samples[line] += 1
        return line

    def _most_seen(self) -> stacks.StackLine:
        ((line, _),) = self._samples.most_common(1)
        return line

    async def last_look(self) -> str:
        """Return the line a call that will be killed is at."""
        self._is_late = True
        return await self.look_now()

    async def look_now(self) -> str:
        """Return the line the call is at; empty if the process does not show it."""
        self._sample(self._stack_pipe.read())
        with suppress(ProcessLookupError):
            os.kill(self._pid, STACK_SIGNAL)
        line = self._sample(await self._stack_pipe.wait(LAST_LOOK_S))
        if line is None and self._samples:
            line = self._most_seen()
        return str(line or "")

    def crash_line(self) -> str:
        """Return the line a process that crashed was at; empty if it could not show it."""
        return str(self._sample(self._stack_pipe.read()) or "")
