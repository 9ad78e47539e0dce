"""A machine with too few cores is said, with what uses them and what to do."""

import asyncio
import os
import subprocess
import sys

import pytest

from rollway.observe.cores import CoreWatch, core_line
from rollway.records.lag import LagStats, ProcessStats, Waits

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel must tell")


def stats(process: str, core_s: float) -> ProcessStats:
    return ProcessStats(process, LagStats(), 0, waits=Waits(core_s=core_s))


async def look(watch: CoreWatch) -> str:
    await asyncio.sleep(0.06)
    return await watch.look()


def test_loops_that_waited_for_cores_are_said_with_what_computes() -> None:
    spin = [sys.executable, "-c", "while True: pass"]
    with subprocess.Popen(spin) as busy:
        watch = CoreWatch(every_s=0.05)
        watch.hear(stats("env.w0", 0.02))
        watch.hear(stats("router", 0.01))
        line = asyncio.run(look(watch))
        busy.kill()
    assert line.startswith(
        "Too few cores: event loops waited 30 ms for a core in the last minute, env.w0 alone 20 ms. "
        f"This machine has {os.cpu_count()}, used by "
    )
    assert "(pid " in line


def test_loops_that_hardly_waited_are_not_worth_a_line() -> None:
    watch = CoreWatch(every_s=0.05)
    watch.hear(stats("env.w0", 0.0005))
    assert asyncio.run(look(watch)) == ""


def test_other_programs_are_to_be_ended() -> None:
    before = {1: ("rollway's trainer-rank", 10.0), 2: ("make", 5.0)}
    after = {1: ("rollway's trainer-rank", 10.2), 2: ("make", 6.5)}
    line = core_line({"env.w0": 3.0}, before, after)
    named = "make (pid 2) 150%, rollway's trainer-rank (pid 1) 20%"
    assert line.endswith(f"{named}: end the other programs, or use another machine")


def test_where_rollway_itself_computes_the_advice_is_another() -> None:
    before = {1: ("rollway's trainer-rank", 10.0), 2: ("make", 5.0)}
    after = {1: ("rollway's trainer-rank", 11.5), 2: ("make", 5.2), 3: ("new", 7.0)}
    line = core_line({"env.w0": 3.0}, before, after)
    assert "rollway's trainer-rank (pid 1) 150%, make (pid 2) 20%: use a machine with" in line
