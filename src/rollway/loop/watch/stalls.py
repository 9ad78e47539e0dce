"""Names the code that holds a loop: a thread samples the loop's stack while the loop is overdue."""

import logging
import sys
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable

from msgspec import structs
from msgspec.structs import replace

from ...records.lag import Stall, StallKind, Waits
from . import stacks
from .causes import added, causes
from .kernel import Beat, CollectorClock, OwnClock
from .rarely import Rarely
from .stall_text import stall_text
from .threads import ThreadWatch

log = logging.getLogger(__name__)

Lines = Counter[stacks.StackLine | None]

NOTICE_S = 0.005
"""A loop that is overdue by less is left alone: on a busy machine an idle loop is overdue too."""
RELAXED_S, ALERT_S = 0.025, 0.010
"""How often the thread looks, and how often for a second after it saw the loop overdue. Looking costs
an idle process 0.35 % and 0.7 % of a core, and no lag that shows."""


class StallWatch:
    """Watches the thread it is created in, between one `beat()` and the next. The loop's own ticker
    calls `beat()`, so an idle loop beats too. Code that holds the loop longer than the budget is a stall
    and is logged; code that holds it for less is only counted. Time for which something else was at
    fault, by the numbers of the kernel and the interpreter, is blamed on no code."""

    def __init__(self, tick_s: float, budget_s: float) -> None:
        self._tick_s = tick_s
        self._budget_s = budget_s
        self._collector = CollectorClock()
        self._clock = OwnClock(self._collector)
        self._last = self._clock.now()
        self._late: deque[tuple[Beat, Beat]] = deque(maxlen=MAX_LATE)
        """Beats that came late, each with the one before, until they are judged."""
        self._seen_after, self._seen = self._last, Lines()
        """The lines at which the loop was seen after its last beat, and how often."""
        self._stopped = threading.Event()
        self._loop_thread = threading.get_ident()
        self._thread = threading.Thread(target=self._watch, name="stall-watch", daemon=True)
        self._lock = threading.Lock()
        self._stalls, self._brief, self._log = StallTotals(), StallTotals(), StallLog()
        self._waits = Waits()
        self.on_held: Callable[[str], None] = lambda where: None
        """The watching thread calls this while the loop is held, with the line that holds it."""

    def __enter__(self) -> "StallWatch":
        self._collector.__enter__()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()
        self._collector.__exit__()
        self._clock.close()

    def beat(self) -> None:
        before, self._last = self._last, self._clock.now()
        if self._last.time_s - before.time_s > self._tick_s + NOTICE_S:
            self._late.append((before, self._last))

    def take(self) -> tuple[tuple[Stall, ...], tuple[Stall, ...], Waits]:
        """Return what ended since the last call: stalls, holds shorter than the budget, and the seconds
        of each cause."""
        with self._lock:
            waits, self._waits = self._waits, Waits()
            return self._stalls.take(), self._brief.take(), waits

    def _watch(self) -> None:
        threads = ThreadWatch(
            self._stopped, {self._loop_thread, threading.get_ident()}, self._sample
        )
        relaxed_s = min(RELAXED_S, self._budget_s / 4)
        pause_s, relax_at_s = relaxed_s, 0.0
        while not threads.pause(pause_s):
            before, now_s = self._last, time.monotonic()
            if now_s - before.time_s > self._tick_s + NOTICE_S:
                pause_s, relax_at_s = min(ALERT_S, relaxed_s), now_s + 1.0
            elif now_s > relax_at_s:
                pause_s = relaxed_s
            while self._late:
                earlier, later = self._late.popleft()
                seen = self._seen if earlier is self._seen_after else Counter()
                self._judge(earlier, later, seen, threads)
        threads.close()

    def _sample(self) -> None:
        """Note the line that the loop is at if it is overdue. Nothing here gives up the GIL: where code
        kept it, the loop would go on before it is looked at."""
        before = self._last
        if time.monotonic() - before.time_s <= self._tick_s + NOTICE_S:
            return
        stack = stacks.from_frame(sys._current_frames().get(self._loop_thread))
        if not stack or self._last is not before:
            return
        if self._seen_after is not before:
            self._seen_after, self._seen = before, Counter()
        line = None if stacks.is_waiting(stack) else stacks.find_user_line(stack)
        self._seen[line] += 1
        if line is not None:
            self.on_held(str(line))

    def _judge(self, before: Beat, after: Beat, lines: Lines, threads: ThreadWatch) -> None:
        """Count why a beat was late, and name the code if it was at fault."""
        missing = threads.between(before.time_s, after.time_s)
        waits, keeper = causes(before, after, self._tick_s, missing), missing.keeper
        line = max(lines, key=lambda line: lines[line], default=None)
        stalls = []
        held_s = waits.code_s
        if line is not None and held_s > NOTICE_S:
            stalls.append(Stall(line.where, line.function, 1, held_s, held_s))
        elif held_s >= self._budget_s:  # the hold ended before this thread could look
            stalls.append(Stall("", "", 1, held_s, held_s))
        if keeper is not None and waits.thread_s > NOTICE_S:
            held_s = waits.thread_s
            stalls.append(replace(keeper, total_s=held_s, longest_s=held_s))
        others: dict[StallKind, float] = {
            "collector": waits.collector_s, "core": waits.core_s, "memory": waits.memory_s,
        }  # fmt: skip
        long = {kind: held_s for kind, held_s in others.items() if held_s >= self._budget_s}
        stalls += [Stall("", "", 1, held_s, held_s, kind) for kind, held_s in long.items()]
        with self._lock:
            self._waits = added(self._waits, waits)
        for stall in stalls:
            self._add(stall)

    def _add(self, stall: Stall) -> None:
        with self._lock:
            if stall.longest_s < self._budget_s:
                self._brief.add(stall)
                return
            self._stalls.add(stall)
        self._log.add(stall)


MAX_PLACES = 100
MAX_LATE = 1_000
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
