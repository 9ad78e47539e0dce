"""How late an event loop ran, over one window."""

from msgspec import Struct, field


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
    """A loop was held for `duration_s`; `where` is the file:line that held it most of the time."""

    where: str
    function: str
    duration_s: float


class ProcessStats(Struct, frozen=True):
    """What one process says of itself, once a second."""

    process: str
    lag: LagStats
    rss_bytes: int
    in_flight: int = 0
    stalls: tuple[Stall, ...] = ()
