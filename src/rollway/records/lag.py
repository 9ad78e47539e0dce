"""How late an event loop ran over one window, and which code made it late."""

from typing import Literal

from msgspec import Struct, field

LAG_STATS = ("min", "mean", "med", "p90", "p99", "max")


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


class Stall(Struct, frozen=True):
    """How often and for how long one line of code (`where`, a file:line) held something up. Kind `loop`
    held the event loop. Kind `lane` held a lane's process and no loop; `call` names that call."""

    where: str
    function: str
    count: int
    total_s: float
    longest_s: float
    kind: Literal["loop", "lane"] = "loop"
    call: str = ""
    was_killed: bool = False
    """The call was killed at its deadline."""


class LateWindow(Struct, frozen=True):
    """A window in which a loop was later than `watch.warn_*` allows; `num_windows` counts them.
    `longest_hold` is the code that held the loop longest in that window, or None if none was seen."""

    stat: str
    lag_s: float
    limit_s: float
    num_windows: int
    longest_hold: Stall | None = None


class ProcessStats(Struct, frozen=True):
    """The figures a process reports about itself once a second."""

    process: str
    lag: LagStats
    rss_bytes: int
    in_flight: int = 0
    stalls: tuple[Stall, ...] = ()
    late: LateWindow | None = None
    children: dict[str, int] = {}
    """Resident memory of its child processes that do not report themselves, in bytes."""
