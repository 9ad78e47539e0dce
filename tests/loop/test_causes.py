"""Time that a loop is late is split among its causes, and no code is blamed for what it did not do."""

import asyncio
import gc
import hashlib
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from rollway.config.specs import WatchSpec
from rollway.loop.watch.causes import Missing, added, causes
from rollway.loop.watch.kernel import Beat
from rollway.loop.watch.run import LoopWatch, run
from rollway.loop.watch.stall_text import stall_text, waits_text
from rollway.records.lag import ProcessStats, Stall, Waits

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel must tell")
SPEC = WatchSpec(stall_ms=100, tick_ms=5, warn_p90_ms=0, warn_p99_ms=0, warn_max_ms=0)
SLOW_PATTERN = re.compile(r"(a+)+$")
amounts = st.floats(0, 10)


@given(
    st.lists(amounts, min_size=5, max_size=5), amounts, amounts, amounts, st.integers(0, 2)
)
def test_causes_add_up_to_the_time_that_was_late(
    used: list[float], thread_s: float, paused_s: float, stolen_s: float, num_faults: int
) -> None:
    late_s, cpu_s, core_s, collector_s, tick_s = used
    before = Beat(100.0, 10.0, 5.0, 7, 1.0)
    after = Beat(
        100.0 + tick_s + late_s, 10.0 + cpu_s, 5.0 + core_s, 7 + num_faults, 1.0 + collector_s
    )
    waits = causes(before, after, tick_s, Missing(thread_s, paused_s, stolen_s))
    parts = structs.astuple(waits)
    assert all(part >= 0 for part in parts)
    assert sum(parts) == pytest.approx(late_s, abs=1e-6)
    assert structs.astuple(added(waits, waits)) == tuple(2 * part for part in parts)


def watched(
    hold: Callable[[], object], times: int = 3, stall_ms: float = 100
) -> ProcessStats:
    """Return what is said of a loop in which this is called, some times."""

    async def main(watch: LoopWatch) -> ProcessStats:
        await asyncio.sleep(0.2)
        watch.take()
        for _ in range(times):
            hold()
            await asyncio.sleep(0.3)
        return watch.take()

    return run("test", structs.replace(SPEC, stall_ms=stall_ms), main)


def in_thread(work: Callable[[], object]) -> Callable[[], None]:
    return lambda: threading.Thread(target=work, name="greedy").start()


def keep_the_gil() -> None:
    """A regular expression that takes half a second, within which the GIL is kept."""
    SLOW_PATTERN.match("a" * 24 + "b")


def of_kind(stats: ProcessStats, kind: str) -> list[Stall]:
    return [stall for stall in stats.stalls if stall.kind == kind]


def named(hold: Callable[[], object], kind: str) -> list[Stall]:
    """Return stalls of which the line was seen. On a busy machine, the thread that keeps the GIL waits
    for a core as well, or has ended before anybody looks."""
    for _ in range(8):
        stalls = of_kind(watched(hold, stall_ms=40), kind)
        found = [stall for stall in stalls if stall.where]
        if found:
            return found
    return []


def test_a_thread_that_keeps_the_gil_is_named_with_its_line() -> None:
    stall, *_ = named(in_thread(keep_the_gil), "thread")
    assert (stall.call, stall.function) == ("greedy", "keep_the_gil")
    assert stall.where.startswith(__file__)
    assert stall.longest_s > 0.04


def test_a_loop_that_keeps_the_gil_itself_is_named() -> None:
    stall, *_ = named(keep_the_gil, "loop")
    assert stall.function == "keep_the_gil"
    assert stall.longest_s > 0.04


def test_a_thread_that_works_without_the_gil_is_blamed_for_nothing() -> None:
    data = bytes(200 << 20)
    stats = watched(in_thread(lambda: hashlib.sha256(data)), times=2)
    assert not stats.stalls


def test_the_collector_is_told_from_the_code_in_which_it_ran() -> None:
    kept = [[n] for n in range(3_000_000)]

    def collect() -> None:
        gc.unfreeze()
        gc.collect()

    stats = watched(collect)
    assert stats.waits.collector_s > 2 * stats.waits.code_s
    assert of_kind(stats, "collector")
    assert not of_kind(stats, "loop")
    assert kept


@contextmanager
def crowd(count: int) -> Iterator[None]:
    """Keep all cores busy."""
    spin = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(spin) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def compute() -> None:
    """Take some 30 ms of a core."""
    end_s = time.thread_time() + 0.03
    while time.thread_time() < end_s:
        pass


@pytest.mark.long
def test_beside_a_crowd_only_code_that_holds_the_loop_is_named() -> None:
    with crowd(8):
        innocent = watched(compute, times=20)
        guilty = watched(lambda: time.sleep(0.2), times=5)
    assert not of_kind(innocent, "loop")
    assert innocent.waits.core_s > innocent.waits.code_s
    (stall,) = of_kind(guilty, "loop")
    assert (
        stall.function
        == "test_beside_a_crowd_only_code_that_holds_the_loop_is_named.<locals>.<lambda>"
    )
    assert stall.count == 5


@pytest.mark.parametrize(
    ("stall", "text"),
    [
        (Stall("f.py:3", "f", 1, 0.25, 0.25, "thread", "lane_3"),
         "loop held for 250 ms by thread 'lane_3', which kept the GIL at f.py:3 in f"),
        (Stall("", "", 1, 0.25, 0.25, "collector"), "loop held for 250 ms by the garbage collector"),
        (Stall("", "", 2, 0.5, 0.3, "core"),
         "loop late 2 times, 500 ms in all, at most 300 ms because no core was free"),
        (Stall("", "", 1, 0.25, 0.25, "memory"),
         "loop late for 250 ms because memory had to be read from a disk"),
        (Stall("", "", 1, 0.25, 0.25), "loop held for 250 ms by code that nobody saw"),
    ],
)  # fmt: skip
def test_causes_in_words(stall: Stall, text: str) -> None:
    assert stall_text(stall) == text


def test_waits_in_words() -> None:
    waits = Waits(code_s=1.0, thread_s=0.02, collector_s=0.004, core_s=0.5)
    told = "want of a core (500 ms), another thread that kept the GIL (20 ms)"
    assert waits_text(waits) == told
