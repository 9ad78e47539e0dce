"""Finds out when another thread kept the GIL, the interpreter's one lock, and which thread it was.

The thread that watches needs the GIL as the loop does. So if it wakes up late, and not for want of a
core, the GIL was not free.
"""

import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from ...records.lag import Stall
from . import stacks
from .causes import Missing
from .kernel import OtherThreads, SchedStat, Usage, stolen_s

Stacks = dict[int, list[stacks.StackLine]]

SLACK_S = 0.002
"""A timer may be this late by itself."""
LOOK_AT_STOLEN_S = 0.25
MAX_KEPT = 200


class Kept(NamedTuple):
    """A time in which the watching thread did not get on."""

    start_s: float
    end_s: float
    keeper: Stall | None
    """The line that kept the GIL; None if no other thread ran much."""


class ThreadWatch:
    """Pauses the watching thread, and notes each pause that took too long. `on_wake` is called first
    after each pause."""

    def __init__(
        self, stopped: threading.Event, without: set[int], on_wake: Callable[[], None]
    ) -> None:
        self._stopped = stopped
        self._on_wake = on_wake
        self._own = SchedStat(threading.get_native_id())
        self._others = OtherThreads(without)
        self._others.look()
        self._kept: deque[Kept] = deque(maxlen=MAX_KEPT)
        self._stolen: deque[tuple[float, float]] = deque(maxlen=MAX_KEPT)

    def pause(self, seconds: float) -> bool:
        """Wait. Return True once the watch is to stop."""
        due_s, (_, waited_s) = time.monotonic() + seconds, self._own.read()
        if self._stopped.wait(seconds):
            return True
        self._on_wake()
        now_s = time.monotonic()
        seen = _stacks() if now_s - due_s > SLACK_S else {}
        # from here on the GIL is given up now and then, and other threads go on
        late_s = now_s - due_s - (self._own.read()[1] - waited_s)
        busiest = self._others.look()
        if late_s > SLACK_S:
            self._note(now_s - late_s, now_s, busiest, seen)
        if not self._stolen or now_s > self._stolen[-1][0] + LOOK_AT_STOLEN_S:
            self._stolen.append((now_s, stolen_s()))
        return False

    def _note(
        self, start_s: float, end_s: float, busiest: Usage | None, seen: Stacks
    ) -> None:
        """Note that this thread did not get on. A thread that kept the GIL may have waited for a core
        meanwhile: that time is not its fault."""
        if busiest is not None and busiest.cpu_s + busiest.core_s > (end_s - start_s) / 2:
            share = busiest.cpu_s / (busiest.cpu_s + busiest.core_s)
            kept_until_s = start_s + share * (end_s - start_s)
            self._kept.append(Kept(start_s, kept_until_s, _keeper(busiest, seen)))
            start_s = kept_until_s
        self._kept.append(Kept(start_s, end_s, None))

    def between(self, start_s: float, end_s: float) -> Missing:
        """Return what the process went without between two moments."""
        kept_s, paused_s, longest_s, keeper = 0.0, 0.0, 0.0, None
        for kept in self._kept:
            shared_s = max(0.0, min(end_s, kept.end_s) - max(start_s, kept.start_s))
            if kept.keeper is None:
                paused_s += shared_s
                continue
            kept_s += shared_s
            if shared_s > longest_s:
                longest_s, keeper = shared_s, kept.keeper
        return Missing(kept_s, paused_s, self._stolen_since(start_s), keeper)

    def _stolen_since(self, start_s: float) -> float:
        before = [seconds for time_s, seconds in self._stolen if time_s <= start_s]
        return stolen_s() - before[-1] if before else 0.0

    def close(self) -> None:
        self._own.close()
        self._others.close()


def _stacks() -> Stacks:
    return {ident: stacks.from_frame(frame) for ident, frame in sys._current_frames().items()}


def _keeper(busiest: Usage, seen: Stacks) -> Stall:
    """Return the line at which a thread was, as what kept the GIL."""
    stack = seen.get(busiest.ident)
    line = stacks.find_user_line(stack) if stack else None
    where, function = (line.where, line.function) if line else ("", "")
    return Stall(where, function, 1, 0.0, 0.0, "thread", busiest.name)
