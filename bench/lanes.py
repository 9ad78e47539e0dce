"""What each kind of work does to a loop's lag, on each lane: the table behind "work has a lane".

    python bench/lanes.py [--full] [--seconds 1.2] [--mb 24] [--json FILE]

One caller does the same piece of work over and over, inline, in one thread or in the process lane, while
a ticker on the loop notes how late it is. A thread helps exactly where the call lets go of the GIL. The
process lane shares a file with its caller, so that no bytes go through its pipe. A *control* only ticks.
"""

import asyncio
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from loopback.control import tick
from loopback.processes import started
from loopback.report import arguments, finish, lag_figures, table
from loopback.works import LETS_GO, WORKS, Material, work_there

from rollway.config.specs import WatchSpec
from rollway.loop.lanes.lanes import ProcessLane
from rollway.loop.lanes.threads import thread
from rollway.loop.watch.run import LoopWatch, run

COLUMNS = (
    "inline p99",
    "inline max",
    "thread p99",
    "thread max",
    "process p99",
    "process max",
)


def measure(path: str, seconds: float) -> dict[str, dict[str, float]]:
    rows: dict[str, dict[str, float]] = {}

    async def repeat(watch: LoopWatch, once: Callable[[], Any]) -> tuple[float, float]:
        await once()
        watch.take()
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            await once()
            await asyncio.sleep(0)
        lag = lag_figures(watch.take().lag)
        return lag["p99 ms"], lag["max ms"]

    async def main(watch: LoopWatch) -> None:
        here = Material(path)
        async with ProcessLane("bench", 1) as lane:
            for name, work in WORKS.items():

                async def inline(work: Callable[[Material], Any] = work) -> None:
                    work(here)

                async def threaded(work: Callable[[Material], Any] = work) -> None:
                    await thread(work, here)

                async def elsewhere(name: str = name) -> None:
                    await lane.call(work_there, path, name, deadline_s=60)

                row = rows[name] = {}
                for kind, once in (
                    ("inline", inline),
                    ("thread", threaded),
                    ("process", elsewhere),
                ):
                    row[f"{kind} p99"], row[f"{kind} max"] = await repeat(watch, once)

    run(
        "bench",
        WatchSpec(stall_ms=1e6, tick_ms=2, warn_p90_ms=0, warn_p99_ms=0, warn_max_ms=0),
        main,
    )
    return rows


def main() -> None:
    args = arguments(
        __doc__, seconds=(1.2, "seconds a cell"), mb=(24, "megabytes of material")
    )
    if args.full:
        args.seconds = max(args.seconds, 6.0)
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)  # the lane imports its work
    with tempfile.NamedTemporaryFile() as file, started(tick) as control:
        Path(file.name).write_bytes(np.random.default_rng(0).bytes(args.mb << 20))
        rows = measure(file.name, args.seconds)
        bare = lag_figures(control.ask())
    print(f"lag of the loop in ms, work on {args.mb} MB at a time")
    table(rows, COLUMNS)
    print(f"control p99 {bare['p99 ms']:.1f}, max {bare['max ms']:.1f}")
    holding = [row for name, row in rows.items() if name not in LETS_GO]
    for lane in ("thread", "process"):
        worst = max(row[f"{lane} p99"] for row in holding)
        print(f"worst p99 of work that holds the GIL, in a {lane}: {worst:.1f} ms")
    worst = max(rows[name]["thread p99"] for name in LETS_GO)
    print(f"worst p99 of work that lets go of it, in a thread: {worst:.1f} ms")
    finish("lanes", {"works": rows, "control": bare}, args.json)


if __name__ == "__main__":
    main()
