"""`ProcessHealth` keeps how processes do, for the commands that watch them."""

import asyncio
import io

import pytest

from rollway.config.specs import WatchSpec
from rollway.loop.watch.run import LoopWatch, run
from rollway.observe.console import Screen
from rollway.observe.health import ProcessHealth
from rollway.records.lag import LagStats, LateWindow, ProcessStats, Stall


def report(
    process: str, lag_s: float, *stalls: Stall, late: LateWindow | None = None
) -> ProcessStats:
    lag = LagStats(max=lag_s, num_ticks=1, buckets={0: 1})
    return ProcessStats(process, lag, rss_bytes=1, stalls=stalls, late=late)


def test_the_last_report_and_the_lag_of_the_whole_run_are_kept() -> None:
    passed_on: list[ProcessStats] = []
    health = ProcessHealth(Screen(io.StringIO()), passed_on.append)
    reports = [report("engine", 0.5), report("trainer", 0.1), report("engine", 0.25)]
    for stats in reports:
        health.hear(stats)
    assert health.latest == {"engine": reports[2], "trainer": reports[1]}
    assert {name: lag.max for name, lag in health.now.items()} == {
        "engine": 0.25,
        "trainer": 0.1,
    }
    assert {name: lag.max for name, lag in health.whole_run.items()} == {
        "engine": 0.5,
        "trainer": 0.1,
    }
    assert health.whole_run["engine"].num_ticks == 2
    assert passed_on == reports


def test_a_culprit_is_printed_when_it_is_seen_and_then_less_often() -> None:
    stream = io.StringIO()
    health = ProcessHealth(Screen(stream))
    for _ in range(100):
        health.hear(report("w0", 0.0, Stall("env.py:9", "rollout", 1, 0.5, 0.5)))
    health.hear(report("w1", 0.0, Stall("env.py:12", "exact", 1, 60.0, 60.0)))
    health.hear(report("w2", 0.0, late=LateWindow("p99", 0.2, 0.1, 1)))
    lines = stream.getvalue().splitlines()
    assert 1 < len([line for line in lines if line.startswith("w0: ")]) < 20
    assert [line.partition(":")[0] for line in lines[-2:]] == ["w1", "w2"]
    worst = [(name, stall.where, stall.total_s) for name, stall in health.worst()]
    assert worst == [("w1", "env.py:12", 60.0), ("w0", "env.py:9", 50.0)]


def test_a_command_hears_its_own_loop() -> None:
    async def main(loop_watch: LoopWatch) -> ProcessStats:
        heard: asyncio.Queue[ProcessStats] = asyncio.Queue()
        health = ProcessHealth(Screen(io.StringIO()), heard.put_nowait)
        watching = asyncio.create_task(health.watch_own_loop(loop_watch))
        stats = await asyncio.wait_for(heard.get(), 20)
        watching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await watching
        return stats

    stats = run("launcher", WatchSpec(), main)
    assert stats.process == "launcher"
    assert stats.lag.num_ticks > 0
