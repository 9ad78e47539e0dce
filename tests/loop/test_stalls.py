"""Loops that are really held, and the code that is named for it."""

import asyncio
import time

import pytest

from rollway.config.specs import WatchSpec
from rollway.loop.watch.lag import Lateness
from rollway.loop.watch.rarely import Rarely
from rollway.loop.watch.run import LoopWatch, run
from rollway.loop.watch.stall_text import late_text, stall_text
from rollway.loop.watch.stalls import ELSEWHERE, MAX_PLACES, StallTotals
from rollway.records.lag import LagStats, LateWindow, ProcessStats, Stall

SILENT = {"warn_p90_ms": 0, "warn_p99_ms": 0, "warn_max_ms": 0}


def hold_the_loop(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


async def hold_often(watch: LoopWatch, seconds: float, times: int) -> ProcessStats:
    await asyncio.sleep(0.05)
    for _ in range(times):
        hold_the_loop(seconds)
        await asyncio.sleep(0.05)
    return watch.take()


def held(stats: ProcessStats) -> list[Stall]:
    """Return what code of the loop did. On a busy machine, cores are missing too."""
    return [stall for stall in stats.stalls if stall.kind == "loop"]


def test_stalls_are_summed_by_place(caplog: pytest.LogCaptureFixture) -> None:
    async def main(watch: LoopWatch) -> None:
        stats = await hold_often(watch, 0.3, times=3)
        assert stats.lag.max >= 0.25
        assert stats.lag.med < 0.1
        stalls = held(stats)
        while (
            sum(stall.count for stall in stalls) < 3
        ):  # the thread that watches may be late itself
            await asyncio.sleep(0.05)
            stalls += held(watch.take())
        assert sum(stall.count for stall in stalls) == 3
        assert {stall.function for stall in stalls} == {"hold_the_loop"}
        assert all(stall.where.startswith(f"{__file__}:") for stall in stalls)
        assert sum(stall.total_s for stall in stalls) >= 0.75
        assert max(stall.longest_s for stall in stalls) >= 0.25
        assert not held(watch.take())

    run("test", WatchSpec(stall_ms=100, tick_ms=5, **SILENT), main)
    first = next(line for line in caplog.messages if "held" in line)
    assert f"by {__file__}:" in first
    assert "hold_the_loop" in first


def test_a_late_window_names_the_code_that_held_the_loop_even_below_a_stall(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main(watch: LoopWatch) -> None:
        stats = await hold_often(watch, 0.1, times=8)
        assert stats.stalls == (), "nothing held the loop for 10 s"
        late = stats.late
        assert late is not None
        assert late.stat in ("p99", "max")
        assert late.lag_s > 0.05
        assert late.num_windows == 1
        assert late.longest_hold is not None
        assert late.longest_hold.function == "hold_the_loop"
        assert late.longest_hold.where.startswith(f"{__file__}:")

    limits = {"warn_p90_ms": 0, "warn_p99_ms": 30, "warn_max_ms": 40}
    run("test", WatchSpec(stall_ms=10_000, tick_ms=5, **limits), main)
    (record,) = caplog.records
    assert record.message.startswith("loop late: ")
    assert f"{__file__}:" in record.message


def test_an_idle_loop_has_no_stalls() -> None:
    async def main(watch: LoopWatch) -> None:
        await asyncio.sleep(0.2)
        stats = watch.take()
        assert stats.stalls == ()
        assert stats.late is None

    run("test", WatchSpec(warn_p90_ms=1000, warn_p99_ms=1000, warn_max_ms=1000), main)


def test_warnings_become_rare_and_say_how_often_it_happened() -> None:
    lateness = Lateness(WatchSpec(warn_p90_ms=10, warn_p99_ms=0, warn_max_ms=100))
    slow, fine = LagStats(p90=0.02, p99=5.0, max=0.05), LagStats(p90=0.001, p99=5.0, max=0.09)
    assert lateness.judge(fine, ()) is None, "a limit of 0 never warns"
    warnings = [lateness.judge(slow, ()) for _ in range(20)]
    assert [late.num_windows for late in warnings if late] == [1, 2, 4, 8, 16]
    assert {late.stat for late in warnings if late} == {"p90"}
    worst = Stall("a.py:1", "f", 7, 0.3, 0.05)
    late = Lateness(WatchSpec()).judge(
        LagStats(max=5.0), (Stall("b.py:1", "g", 1, 0.1, 0.1), worst)
    )
    assert late is not None
    assert late.longest_hold == worst


def test_powers_of_two_are_worth_a_line() -> None:
    rarely = Rarely()
    assert [count for count in range(1, 40) if rarely.add()] == [1, 2, 4, 8, 16, 32]
    assert rarely.count == 39
    assert not rarely.rise_to(63)
    assert rarely.rise_to(70)


def test_places_are_bounded_and_no_stall_is_lost() -> None:
    totals = StallTotals()
    for n in range(10 * MAX_PLACES):
        totals.add(Stall(f"a.py:{n}", "f", 1, 0.5, 0.5))
        totals.add(Stall("a.py:0", "f", 1, 2.0, 2.0))
    seen = totals.take()
    assert len(seen) <= MAX_PLACES + 1
    assert sum(stall.count for stall in seen) == 20 * MAX_PLACES
    assert seen[0] == Stall("a.py:0", "f", 10 * MAX_PLACES + 1, 20 * MAX_PLACES + 0.5, 2.0)
    assert ELSEWHERE in {stall.where for stall in seen}
    assert totals.take() == ()


@pytest.mark.parametrize(
    ("stall", "text"),
    [
        (Stall("f.py:3", "f", 1, 0.25, 0.25), "loop held for 250 ms by f.py:3 in f"),
        (
            Stall("f.py:3", "f", 4, 3.0, 1.25),
            "loop held 4 times, 3,000 ms in all, at most 1,250 ms by f.py:3 in f",
        ),
        (
            Stall("env.py:12", "helper", 1, 2.0, 2.0, "lane", "reward `exact`"),
            "reward `exact` took 2,000 ms in its process, at env.py:12 in helper (no loop was held)",
        ),
    ],
)
def test_stalls_in_words(stall: Stall, text: str) -> None:
    assert stall_text(stall) == text


def test_lateness_in_words() -> None:
    late = LateWindow("p99", 0.0451, 0.03, 4, Stall("env.py:12", "f", 7, 0.31, 0.045))
    assert late_text(late) == (
        "loop late: p99 45 ms, above the limit of 30 ms (window 4 so far); "
        "env.py:12 in f held it 7 times, 310 ms in all"
    )
    assert "no code was seen" in late_text(LateWindow("max", 0.2, 0.1, 1))
