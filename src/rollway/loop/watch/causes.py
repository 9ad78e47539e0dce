"""Splits the time by which a loop was late among its causes, by what was measured. Pure."""

from msgspec import Struct

from ...records.lag import Stall, Waits
from .kernel import Beat


class Missing(Struct, frozen=True):
    """What the watching thread noticed between two beats: what the process as a whole went without."""

    thread_s: float = 0.0
    """Another thread kept the GIL, and ran."""
    paused_s: float = 0.0
    """The GIL was not free, and no other thread ran much: the whole process was held up."""
    stolen_s: float = 0.0
    """The machine's cores did something else than this system, each on average."""
    keeper: Stall | None = None
    """The line that kept the GIL longest."""


def causes(before: Beat, after: Beat, tick_s: float, missing: Missing) -> Waits:
    """Return why the second beat was late. What nothing else explains was done by the code that ran in
    the loop: it computed, or waited for something that no loop should wait for."""
    late_s = max(0.0, after.time_s - before.time_s - tick_s)
    core_s = min(late_s, after.core_s - before.core_s + missing.stolen_s)
    left_s = late_s - core_s
    collector_s = min(left_s, after.collector_s - before.collector_s)
    asleep_s = max(0.0, left_s - (after.cpu_s - before.cpu_s))
    thread_s = min(asleep_s, missing.thread_s)
    paused_s = min(asleep_s - thread_s, missing.paused_s)
    has_faults = after.num_faults > before.num_faults
    memory_s = asleep_s - thread_s - paused_s if has_faults else 0.0
    code_s = max(0.0, left_s - collector_s - thread_s - paused_s - memory_s)
    return Waits(code_s, thread_s, collector_s, core_s + paused_s, memory_s)


def added(a: Waits, b: Waits) -> Waits:
    return Waits(
        a.code_s + b.code_s,
        a.thread_s + b.thread_s,
        a.collector_s + b.collector_s,
        a.core_s + b.core_s,
        a.memory_s + b.memory_s,
    )
