"""How late an event loop ran, over one window, and what made it late."""

from typing import Literal

from msgspec import Struct, field

LAG_STATS = ("min", "mean", "med", "p90", "p99", "max")


class LagStats(Struct, frozen=True):
    """Seconds of lateness of a loop's ticks.

    `buckets` counts ticks by lateness on a logarithmic scale, so that windows can be merged.
    """

    min: float = 0.0
    mean: float = 0.0
    med: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    max: float = 0.0
    num_ticks: int = 0
    buckets: dict[int, int] = field(default_factory=dict)


class Stall(Struct, frozen=True):
    """How often and how long one place in the code held something longer than it should.

    Of kind `loop` it held the event loop. Of kind `lane` it held a lane's process, and no loop:
    `call` says which call that was. `where` is a file:line.
    """

    where: str
    function: str
    count: int
    total_s: float
    longest_s: float
    kind: Literal["loop", "lane"] = "loop"
    call: str = ""


class LateWindow(Struct, frozen=True):
    """A window in which a loop was later than `watch.warn_*` allows, number `num_windows` of its kind.

    `culprit` held the loop longest in that window; None if nobody was seen holding it.
    """

    stat: str
    lag_s: float
    limit_s: float
    num_windows: int
    culprit: Stall | None = None


class ProcessStats(Struct, frozen=True):
    """What one process says of itself, once a second."""

    process: str
    lag: LagStats
    rss_bytes: int
    in_flight: int = 0
    stalls: tuple[Stall, ...] = ()
    late: LateWindow | None = None
