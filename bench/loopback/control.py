"""The control: a process with nothing on its loop but a ticker, so that the machine's noise is known."""

import asyncio
from multiprocessing.connection import Connection

from loopback.report import QUIET
from rollway.config.specs import WatchSpec
from rollway.loop.watch.run import LoopWatch, run


def tick(pipe: Connection, config: WatchSpec = QUIET) -> None:
    """Answers every message with the lag since the last one."""

    async def main(watch: LoopWatch) -> None:
        while True:
            await asyncio.sleep(0.05)
            if pipe.poll():
                pipe.recv()
                pipe.send(watch.take().lag)

    run("control", config, main)
