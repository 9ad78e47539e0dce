"""How late an event loop ran over one window, and which code made it late."""

from typing import Literal

from msgspec import Struct, field

LAG_STATS = ("min", "mean", "med", "p90", "p99", "max")


StallKind = Literal["loop", "lane", "thread", "collector", "core", "memory"]


class LagStats(Struct, frozen=True):
    """How many seconds late a loop's ticks came. `buckets` counts ticks by lateness on a logarithmic
    scale, so that windows can be merged."""

    min: float = 0.0
    mean: float = 0.0
    med: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    max: float = 0.0
    num_ticks: int = 0
    buckets: dict[int, int] = field(default_factory=dict)


class Waits(Struct, frozen=True):
    """Why a loop was late, in seconds of each cause."""

    code_s: float = 0.0
    """Code that ran in the loop: it computed, or waited for something that no loop should wait for."""
    thread_s: float = 0.0
    """Another thread of the process kept the GIL."""
    collector_s: float = 0.0
    """The garbage collector ran."""
    core_s: float = 0.0
    """Nothing but a core was missing."""
    memory_s: float = 0.0
    """Pages had to be read from a disk first."""


class Stall(Struct, frozen=True):
    """How often and for how long something held something up. A line of code (`where`, a file:line) held
    the event loop (kind `loop`), kept the GIL in the thread `call` (`thread`), or held a lane's process,
    but no loop, in the call `call` (`lane`). The other kinds have no line: see Waits."""

    where: str
    function: str
    count: int
    total_s: float
    longest_s: float
    kind: StallKind = "loop"
    call: str = ""
    was_killed: bool = False
    """The call was killed at its deadline."""


class LateWindow(Struct, frozen=True):
    """A window in which a loop was later than `watch.warn_*` allows; `num_windows` counts them.
    `longest_hold` is the code that held the loop longest in that window, or None if none was seen.
    `waits` are all causes."""

    stat: str
    lag_s: float
    limit_s: float
    num_windows: int
    longest_hold: Stall | None = None
    waits: Waits = Waits()


class ProcessStats(Struct, frozen=True):
    """The figures a process reports about itself once a second."""

    process: str
    lag: LagStats
    rss_bytes: int
    in_flight: int = 0
    stalls: tuple[Stall, ...] = ()
    late: LateWindow | None = None
    waits: Waits = Waits()
    """Why its loop was late in this second."""
    children: dict[str, int] = {}
    """Resident memory of its child processes that do not report themselves, in bytes."""
