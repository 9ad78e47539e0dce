"""Sees where a call in a lane's process is, once it takes longer than it should."""

import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

from ..records.lag import Stall
from . import stacks
from .laneserver import STACK_SIGNAL
from .stackpipe import StackPipe

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
        self._seen: Counter[stacks.Line] = Counter()
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

    def _note(self, stack: list[stacks.Line]) -> stacks.Line | None:
        if not stack:
            return None
        if entered := stacks.entered(stack):
            self._entered = entered.function
        line = stacks.culprit(stack)
        self._seen[line] += 1
        return line

    def _most_seen(self) -> stacks.Line:
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
