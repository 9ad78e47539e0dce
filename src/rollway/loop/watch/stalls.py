"""Names the code that holds a loop: a thread samples the loop's stack while the loop is overdue."""

import logging
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable

from msgspec import structs

from ...records.lag import Stall
from . import stacks
from .rarely import Rarely
from .stall_text import stall_text

log = logging.getLogger(__name__)

NOTICE_S = 0.005
"""A loop that is overdue by less is left alone: on a busy machine an idle loop is overdue too."""
RELAXED_S, ALERT_S = 0.025, 0.010
"""How often the thread looks, and how often for a second after it saw the loop overdue. Looking costs
an idle process 0.35 % and 0.7 % of a core, and no lag that shows."""


class StallWatch:
    """Watches the thread it is created in, between one `beat()` and the next. The loop's own ticker
    calls `beat()`, so an idle loop beats too. Code that holds the loop longer than the budget is a stall
    and is logged; code that holds it for less is only counted."""

    def __init__(self, tick_s: float, budget_s: float) -> None:
        self._tick_s = tick_s
        self._budget_s = budget_s
        now_s = time.monotonic()
        self._beats_s = (now_s, now_s)
        self._stopped = threading.Event()
        self._loop_thread = threading.get_ident()
        self._thread = threading.Thread(target=self._watch, name="stall-watch", daemon=True)
        self._lock = threading.Lock()
        self._stalls, self._brief, self._log = StallTotals(), StallTotals(), StallLog()
        self.on_held: Callable[[str], None] = lambda where: None
        """The watching thread calls this while the loop is held, with the line that holds it."""

    def __enter__(self) -> "StallWatch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def beat(self) -> None:
        self._beats_s = (self._beats_s[1], time.monotonic())

    def take(self) -> tuple[tuple[Stall, ...], tuple[Stall, ...]]:
        """Return what ended since the last call: stalls, and holds shorter than the budget."""
        with self._lock:
            return self._stalls.take(), self._brief.take()

    def _watch(self) -> None:
        relaxed_s = min(RELAXED_S, self._budget_s / 4)
        pause_s, relax_at_s = relaxed_s, 0.0
        while not self._stopped.wait(pause_s):
            started_s, now_s = self._beats_s[1], time.monotonic()
            if now_s - started_s > self._tick_s + NOTICE_S:
                self._follow(started_s)
                pause_s, relax_at_s = min(ALERT_S, relaxed_s), now_s + 1.0
            elif now_s > relax_at_s:
                pause_s = relaxed_s

    def _follow(self, started_s: float) -> None:
        """Sample the stack until the loop beats again, then count the line seen most often."""
        pause_s = min(ALERT_S, self._budget_s / 4)
        samples: Counter[stacks.StackLine | None] = Counter()
        while self._beats_s[1] == started_s and not self._stopped.is_set():
            stack = stacks.from_frame(sys._current_frames().get(self._loop_thread))
            if stack and self._beats_s[1] == started_s:
                line = None if stacks.is_waiting(stack) else stacks.find_user_line(stack)
                samples[line] += 1
                if line is not None:
                    self.on_held(str(line))
            self._stopped.wait(pause_s)
        line = max(samples, key=lambda line: samples[line], default=None)
        if line is None:
            return  # the loop was late because it got no CPU; the lag shows that
        # the hold ended with the first beat after `started_s`; another beat may have come since
        previous_s, last_s = self._beats_s
        ended_s = last_s if previous_s == started_s else previous_s
        held_s = ended_s - started_s - self._tick_s
        self._add(Stall(line.where, line.function, 1, held_s, held_s))

    def _add(self, stall: Stall) -> None:
        with self._lock:
            if stall.longest_s < self._budget_s:
                self._brief.add(stall)
                return
            self._stalls.add(stall)
        self._log.add(stall)


MAX_PLACES = 100
ELSEWHERE = "(other places)"

_Place = tuple[str, str, str, str, bool]


def total(a: Stall, b: Stall) -> Stall:
    count, total_s = a.count + b.count, a.total_s + b.total_s
    longest_s = max(a.longest_s, b.longest_s)
    return structs.replace(a, count=count, total_s=total_s, longest_s=longest_s)


class StallTotals:
    """One sum for each place. Places beyond the hundredth share one sum, so memory stays bounded."""

    def __init__(self) -> None:
        self._by_place: dict[_Place, Stall] = {}
        self._times: defaultdict[_Place, Rarely] = defaultdict(Rarely)

    def add(self, stall: Stall) -> tuple[Stall, bool]:
        """Count a stall. Return the sum of its place, and whether that sum is worth a line now."""
        place = _place(stall)
        if place not in self._by_place and len(self._by_place) >= MAX_PLACES:
            stall = structs.replace(stall, where=ELSEWHERE, function="", call="")
            place = _place(stall)
        old = self._by_place.get(place)
        new = self._by_place[place] = total(old, stall) if old else stall
        return new, self._times[place].rise_to(new.count)

    def seen(self) -> tuple[Stall, ...]:
        """Return all sums, the longest total first."""
        totals = self._by_place.values()
        return tuple(sorted(totals, key=lambda stall: (-stall.total_s, stall.where)))

    def take(self) -> tuple[Stall, ...]:
        seen, self._by_place = self.seen(), {}
        self._times.clear()
        return seen


class StallLog:
    """Logs the 1st, 2nd, 4th, 8th, … stall of each place."""

    def __init__(self) -> None:
        self._totals = StallTotals()

    def add(self, stall: Stall) -> None:
        place_total, is_worth_a_line = self._totals.add(stall)
        if is_worth_a_line:
            times = f" (time {place_total.count})" if place_total.count > 1 else ""
            log.warning("%s%s", stall_text(stall), times)


def _place(stall: Stall) -> _Place:
    return stall.kind, stall.where, stall.function, stall.call, stall.was_killed
