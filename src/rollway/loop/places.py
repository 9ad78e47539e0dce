"""Hands out what is free to those who wait for it, in the order they came."""

import asyncio
from collections import deque
from typing import Generic, TypeVar

from ..errors import LaneClosed, LaneFull

T = TypeVar("T")


class Places(Generic[T]):
    """A bounded, fair queue of callers. What is freed goes straight to the one who waited longest.

    Not an `asyncio.Queue`: there a newcomer may overtake a waiter that was woken and has not run yet.
    """

    def __init__(self, name: str, max_waiting: int) -> None:
        self._name = name
        self._max_waiting = max_waiting
        self._free: deque[T] = deque()
        self._waiting: dict[asyncio.Future[T], None] = {}
        self._closed = False

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def free(self, one: T) -> None:
        """Give it to the first who waits, or keep it for the next to come."""
        while self._waiting:
            waiter = next(iter(self._waiting))
            del self._waiting[waiter]
            if not waiter.done():
                waiter.set_result(one)
                return
        self._free.append(one)

    async def take(self) -> T:
        """One of what is free, once it is this caller's turn."""
        if self._closed:
            raise LaneClosed(f"{self._name} is closed")
        if self._free:
            return self._free.popleft()
        if len(self._waiting) >= self._max_waiting:
            raise LaneFull(f"{self._name} has {self._max_waiting} callers waiting already")
        turn: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting[turn] = None
        try:
            return await turn
        except asyncio.CancelledError:
            self._waiting.pop(turn, None)
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self.free(turn.result())  # it was given to a caller that had just gone
            raise

    def close(self) -> None:
        """Nobody gets anything any more; those who wait are told."""
        self._closed = True
        waiting, self._waiting = list(self._waiting), {}
        for turn in waiting:
            if not turn.done():
                turn.set_exception(LaneClosed(f"{self._name} is closed"))
