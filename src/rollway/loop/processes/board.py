"""A page of memory that shows whose code a process runs right now, and outlives the process.

The parent makes it and hands it down; the child marks it at every step of a coroutine that belongs to
somebody. However the child ends, the parent can read who was running, since when and, if a watch saw it
held there, at which line.
"""

import asyncio
import mmap
import os
import tempfile
import time
from collections.abc import Coroutine, Generator, Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from typing import Any

from msgspec import Struct

SIZE = 4096
_OWNER, _SINCE, _LINE_SINCE, _LINE_LENGTH, _QUIT = range(5)
"""Words of the page; the line's text follows them."""
_TEXT = 64
_owner: ContextVar[int] = ContextVar("owner", default=0)


class BoardReading(Struct, frozen=True):
    """Number `owner` has been running for `held_s`, last seen at `where`."""

    owner: int
    held_s: float
    where: str


class Board:
    """One page, written by one process."""

    def __init__(self, fd: int) -> None:
        self._page = mmap.mmap(fd, SIZE)
        self._view = memoryview(self._page)
        self.words = self._view.cast("Q")

    def show_line(self, where: str) -> None:
        """Where the owner is. May be called by a thread, while the owner holds the loop."""
        text = where.encode()[: SIZE - _TEXT]
        self.words[_LINE_LENGTH] = 0
        self._view[_TEXT : _TEXT + len(text)] = text
        self.words[_LINE_SINCE] = self.words[_SINCE]
        self.words[_LINE_LENGTH] = len(text)

    def read(self) -> BoardReading | None:
        """Who runs; after its process has ended, who ran last and never came to an end."""
        words = self.words
        owner, since_ns = words[_QUIT] or words[_OWNER], words[_SINCE]
        if not owner:
            return None
        length = words[_LINE_LENGTH] if words[_LINE_SINCE] == since_ns else 0
        where = bytes(self._view[_TEXT : _TEXT + length]).decode(errors="replace")
        return BoardReading(owner, max(0.0, (time.monotonic_ns() - since_ns) / 1e9), where)

    def close(self) -> None:
        self.words.release()
        self._view.release()
        self._page.close()

    def mark_tasks_of(self, loop: asyncio.AbstractEventLoop) -> None:
        """From now on every step of a task that has an owner is marked."""

        def factory(loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> "asyncio.Task[Any]":
            context = options.get("context")
            owner = _owner.get() if context is None else context.get(_owner, 0)
            return asyncio.Task(
                MarkedCoroutine(self, owner, coro) if owner else coro, loop=loop, **options
            )

        loop.set_task_factory(factory)


class MarkedCoroutine(Coroutine[Any, Any, Any]):
    """A coroutine that shows its owner on the board while it runs, and not while it waits."""

    __slots__ = ("_coro", "_owner", "_words")

    def __init__(self, board: Board, owner: int, coro: Coroutine[Any, Any, Any]) -> None:
        self._words = board.words
        self._owner = owner
        self._coro = coro

    def send(self, value: Any) -> Any:
        words = self._words
        words[_SINCE] = time.monotonic_ns()
        words[_OWNER] = self._owner
        try:
            return self._coro.send(value)
        except (SystemExit, KeyboardInterrupt):
            words[_QUIT] = self._owner  # this ends the process, after others have had a step
            raise
        finally:
            words[_OWNER] = 0

    def throw(self, *error: Any) -> Any:
        words = self._words
        words[_SINCE] = time.monotonic_ns()
        words[_OWNER] = self._owner
        try:
            return self._coro.throw(*error)
        finally:
            words[_OWNER] = 0

    def close(self) -> None:
        self._coro.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._coro.__await__()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._coro, name)  # libraries ask coroutines whether they have started


def owned_by(owner: int) -> Context:
    """A context for a task of `owner`, and for whatever tasks it starts."""
    context = copy_context()
    context.run(_owner.set, owner)
    return context


@contextmanager
def new_board() -> Iterator[tuple[Board, int]]:
    """An empty board, and the file to hand down."""
    fd = _memory_file()
    try:
        os.ftruncate(fd, SIZE)
        board = Board(fd)
        try:
            yield board, fd
        finally:
            board.close()
    finally:
        os.close(fd)


def _memory_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("board")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
