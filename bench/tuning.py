"""What the interpreter's two knobs do to a loop: how often threads switch, when garbage is collected.

    python bench/tuning.py [--full] [--seconds 3] [--json FILE]

*switch* runs a loop beside two threads of pure Python; *gc* grows 100,000 records on a loop and lets
them go, with Python's collector at some thresholds and with ours. Each setting gets a process of its
own. A star marks what rollway does.
"""

import asyncio
import gc
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection

from loopback.control import tick
from loopback.processes import started
from loopback.report import arguments, finish, lag_figures, table

from rollway.config.specs import WatchSpec
from rollway.loop.watch.lag import LagMonitor, LagStats
from rollway.loop.watch.run import SWITCH_INTERVAL_S, LoopWatch, run
from rollway.records.ids import PolicyVersion, RolloutId, WorkerName
from rollway.records.payload import PayloadRef
from rollway.records.rollout import RowSummary, Scored, Settled, Timing

QUIET = WatchSpec(stall_ms=1e6, tick_ms=2, warn_p90_ms=0, warn_p99_ms=0, warn_max_ms=0)
SWITCHES_MS = (5.0, 1.0, 0.5, 0.25)
THRESHOLDS = {
    "default": (700, 10, 10),
    "5k, 10, 100": (5_000, 10, 100),
    "20k, 5, 50": (20_000, 5, 50),
}
NUM_RECORDS = 100_000


def busy(pipe: Connection, switch_s: float, seconds: float) -> None:
    """Lag beside two busy threads, and how much they got done."""
    done = [0, 0]
    stop = threading.Event()

    def work(index: int) -> None:
        while not stop.is_set():
            done[index] += sum(range(100)) > 0

    async def main(watch: LoopWatch) -> None:
        sys.setswitchinterval(switch_s)
        threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        watch.take()
        await asyncio.sleep(seconds)
        figures = lag_figures(watch.take().lag)
        stop.set()
        pipe.send({**figures, "work/s": sum(done) / seconds})

    run("busy", QUIET, main)


def settled(number: int) -> Settled:
    """A record as an orchestrator keeps it until its step is trained."""
    scored = Scored(
        reward=1.0, rewards={"exact": 1.0}, metrics={"length": 3.0},
        rows=(RowSummary(18_000, 9_000),), ref=PayloadRef(f"w0.0-{number:04d}.seg", number, 64),
        num_turns=20, stop="stop", first_version=PolicyVersion(0), last_version=PolicyVersion(0),
        timing=Timing(1.0, 1.0, 1.0, 3.0),
    )  # fmt: skip
    return Settled(RolloutId(f"r{number}"), 1, WorkerName("w0"), scored)


def records(
    pipe: Connection, thresholds: tuple[int, int, int] | None, seconds: float
) -> None:
    """Lag while records come and go, and how many came. Without thresholds, our collector runs."""

    async def come_and_go(take: Callable[[], LagStats]) -> None:
        kept: deque[Settled] = deque(maxlen=NUM_RECORDS)
        count, end_s = 0, time.monotonic() + seconds
        take()
        while time.monotonic() < end_s:
            for _ in range(100):
                count += 1
                kept.append(settled(count))
            await asyncio.sleep(0.001)
        pipe.send({**lag_figures(take()), "work/s": count / seconds})

    async def main(watch: LoopWatch) -> None:
        await come_and_go(lambda: watch.take().lag)

    async def plain() -> None:
        with LagMonitor(QUIET.tick_ms / 1000) as lag:
            await come_and_go(lag.take)

    if thresholds is None:
        run("records", QUIET, main)
    else:
        gc.set_threshold(*thresholds)
        asyncio.run(plain())


def main() -> None:
    args = arguments(__doc__, seconds=(3.0, "seconds a setting"))
    if args.full:
        args.seconds = max(args.seconds, 15.0)
    rows = {}
    with started(tick) as control:
        for switch_ms in SWITCHES_MS:
            star = " *" if switch_ms / 1000 == SWITCH_INTERVAL_S else ""
            with started(busy, switch_ms / 1000, args.seconds) as process:
                rows[f"switch {switch_ms:g} ms{star}"] = process.pipe.recv()
        for name, thresholds in THRESHOLDS.items():
            with started(records, thresholds, args.seconds) as process:
                rows[f"gc {name}"] = process.pipe.recv()
        with started(records, None, args.seconds) as process:
            rows["gc in short steps *"] = process.pipe.recv()
        rows["control"] = lag_figures(control.ask())
    table(rows, ("p50 ms", "p99 ms", "max ms", "work/s"))
    ratio = rows["switch 5 ms"]["p99 ms"] / rows["switch 0.5 ms *"]["p99 ms"]
    print(f"ratio p99, switch interval 5 ms to 0.5 ms: {ratio:.1f}")
    ratio = rows["gc 5k, 10, 100"]["max ms"] / rows["gc in short steps *"]["max ms"]
    print(f"ratio max, collector with thresholds to ours: {ratio:.1f}")
    finish("tuning", rows, args.json)


if __name__ == "__main__":
    main()
