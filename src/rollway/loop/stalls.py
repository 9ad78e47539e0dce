"""Names what held a loop: a thread that samples the loop thread's stack while it overruns."""

import linecache
import logging
import sys
import sysconfig
import threading
import time
from collections import Counter
from pathlib import Path
from types import FrameType

from ..records.lag import Stall

log = logging.getLogger(__name__)

_LIBRARIES = tuple(
    str(Path(path).resolve())
    for path in {sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sys.base_prefix}
)
MAX_KEPT = 100


class StallWatch:
    """Between `beat()`s longer than the budget, samples who holds the loop and reports it once.

    A beat comes from the loop's own ticker, so an idle loop beats too.
    """

    def __init__(self, tick_s: float, budget_s: float) -> None:
        self._tick_s = tick_s
        self._budget_s = budget_s
        self._beat_s = time.monotonic()
        self._stopped = threading.Event()
        self._loop_thread = threading.get_ident()
        self._thread = threading.Thread(target=self._watch, name="stall-watch", daemon=True)
        self._stalls: list[Stall] = []

    def __enter__(self) -> "StallWatch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def beat(self) -> None:
        self._beat_s = time.monotonic()

    def take(self) -> tuple[Stall, ...]:
        """The stalls that ended since the last call."""
        stalls, self._stalls = self._stalls, []
        return tuple(stalls)

    def _watch(self) -> None:
        pause_s = self._budget_s / 4
        while not self._stopped.wait(pause_s):
            started_s = self._beat_s
            if time.monotonic() - started_s > self._tick_s + self._budget_s:
                self._follow(started_s)

    def _follow(self, started_s: float) -> None:
        """Sample until the loop beats again, then report the place seen most often."""
        seen: Counter[tuple[str, str]] = Counter()
        while self._beat_s == started_s and not self._stopped.is_set():
            frame = sys._current_frames().get(self._loop_thread)
            if frame is not None:
                seen[_culprit(frame)] += 1
            self._stopped.wait(self._budget_s / 4)
        if not seen:
            return
        (where, function), _ = seen.most_common(1)[0]
        stall = Stall(where, function, self._beat_s - started_s - self._tick_s)
        if len(self._stalls) < MAX_KEPT:
            self._stalls.append(stall)
        path, _, line = where.rpartition(":")
        log.warning(
            "loop held for %.0f ms by %s in %s: %s",
            stall.duration_s * 1000, where, function, linecache.getline(path, int(line)).strip(),
        )  # fmt: skip


def _culprit(frame: FrameType) -> tuple[str, str]:
    """The innermost frame that is neither the standard library's nor a package's, else the innermost."""
    innermost = frame
    current: FrameType | None = frame
    while current is not None:
        filename = current.f_code.co_filename
        if not filename.startswith(("<", *_LIBRARIES)):
            return f"{filename}:{current.f_lineno}", current.f_code.co_qualname
        current = current.f_back
    return f"{innermost.f_code.co_filename}:{innermost.f_lineno}", innermost.f_code.co_qualname
