"""A process whose loop does nothing but tick: what it is late by, everything on this machine is."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rollway.config.specs import WatchSpec
from rollway.loop.watch.run import LoopWatch, run
from rollway.records.lag import LagStats

WINDOW_S = 1.0
"""As long as the windows in which the processes of a run report."""


class Control:
    """Has the lag of each second in `windows` once the block has ended."""

    def __init__(self) -> None:
        self.windows: list[LagStats] = []


@contextmanager
def control() -> Iterator[Control]:
    found = Control()
    command = [sys.executable, __file__]
    with subprocess.Popen(
        command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        try:
            yield found
        finally:
            out, _ = process.communicate()  # which ends it
            for line in out.splitlines():
                median, p99, most = json.loads(line)
                found.windows.append(LagStats(med=median, p99=p99, max=most))


async def tick(watch: LoopWatch) -> None:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(sys.stdin, ended.set)
    watch.take()
    while not ended.is_set():
        await asyncio.sleep(WINDOW_S)
        lag = watch.take().lag
        print(json.dumps([lag.med, lag.p99, lag.max]), flush=True)


if __name__ == "__main__":
    run("control", WatchSpec(), tick)
