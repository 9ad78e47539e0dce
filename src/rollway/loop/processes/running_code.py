"""A page of shared memory that shows whose code a process is running, and outlives the process.

The parent creates the page and passes it to the child. The child marks the page whenever a coroutine
that has an owner runs. However the child ends, the parent can read which owner was running, since when
and, if a watch saw it hold the loop, at which line.
"""

import asyncio
import mmap
import os
import tempfile
import time
from collections.abc import Coroutine, Generator, Iterator
from contextlib import closing, contextmanager
from contextvars import Context, ContextVar, copy_context
from typing import Any

from msgspec import Struct

from ...errors import CodeQuit

SIZE = 4096
_OWNER, _SINCE, _LINE_SINCE, _LINE_LENGTH = range(4)
"""The words of the page; the text of the line follows them."""
_TEXT = 64
_owner: ContextVar[int] = ContextVar("owner", default=0)


class RunningOwner(Struct, frozen=True):
    """The owner whose code has been running for `held_s`, last seen at `where`."""

    owner: int
    held_s: float
    where: str


class RunningCodePage:
    """The page itself. One process writes it, and any process that has mapped it can read it."""

    def __init__(self, fd: int) -> None:
        self._page = mmap.mmap(fd, SIZE)
        self._view = memoryview(self._page)
        self.words = self._view.cast("Q")

    def show_line(self, where: str) -> None:
        """Show the line the owner is at. A thread may call this while the owner holds the loop."""
        text = where.encode()[: SIZE - _TEXT]
        self.words[_LINE_LENGTH] = 0
        self._view[_TEXT : _TEXT + len(text)] = text
        self.words[_LINE_SINCE] = self.words[_SINCE]
        self.words[_LINE_LENGTH] = len(text)

    def read(self) -> RunningOwner | None:
        """Return the owner that runs; after the process has ended, the one that was running then."""
        words = self.words
        owner, since_ns = words[_OWNER], words[_SINCE]
        if not owner:
            return None
        length = words[_LINE_LENGTH] if words[_LINE_SINCE] == since_ns else 0
        where = bytes(self._view[_TEXT : _TEXT + length]).decode(errors="replace")
        return RunningOwner(owner, max(0.0, (time.monotonic_ns() - since_ns) / 1e9), where)

    def close(self) -> None:
        self.words.release()
        self._view.release()
        self._page.close()

    def mark_tasks_of(self, loop: asyncio.AbstractEventLoop) -> None:
        """From now on, mark the page whenever a task of this loop that has an owner runs."""

        def factory(
            loop: asyncio.AbstractEventLoop, coro: Any, **options: Any
        ) -> "asyncio.Task[Any]":
            context = options.get("context")
            owner = _owner.get() if context is None else context.get(_owner, 0)
            if owner:
                coro = MarkedCoroutine(self, owner, coro)
            return asyncio.Task(coro, loop=loop, **options)

        loop.set_task_factory(factory)


class MarkedCoroutine(Coroutine[Any, Any, Any]):
    """A coroutine that shows its owner on the page while it runs, and not while it waits."""

    __slots__ = ("_coro", "_owner", "_words")

    def __init__(
        self, page: RunningCodePage, owner: int, coro: Coroutine[Any, Any, Any]
    ) -> None:
        self._words = page.words
        self._owner = owner
        self._coro = coro

    def send(self, value: Any) -> Any:
        words = self._words
        words[_SINCE] = time.monotonic_ns()
        words[_OWNER] = self._owner
        try:
            return self._coro.send(value)
        except (SystemExit, KeyboardInterrupt) as error:
            raise CodeQuit(error) from error  # a task that raises these ends the process
        finally:
            words[_OWNER] = 0

    def throw(self, *error: Any) -> Any:
        words = self._words
        words[_SINCE] = time.monotonic_ns()
        words[_OWNER] = self._owner
        try:
            return self._coro.throw(*error)
        except (SystemExit, KeyboardInterrupt) as quitting:
            raise CodeQuit(quitting) from quitting
        finally:
            words[_OWNER] = 0

    def close(self) -> None:
        self._coro.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._coro.__await__()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._coro, name)  # libraries ask coroutines whether they have started


def owned_by(owner: int) -> Context:
    """Return a context for a task of `owner`. Tasks that the task starts have the same owner."""
    context = copy_context()
    context.run(_owner.set, owner)
    return context


@contextmanager
def new_page() -> Iterator[tuple[RunningCodePage, int]]:
    """Create an empty page; yield it and the file descriptor to pass to the child."""
    fd = _memory_file()
    try:
        os.ftruncate(fd, SIZE)
        with closing(RunningCodePage(fd)) as page:
            yield page, fd
    finally:
        os.close(fd)


def _memory_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("running-code")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
