"""A trainer that takes batches in, and trains nothing: it opens every row of each manifest."""

import asyncio
import time
from multiprocessing.connection import Connection

from loopback.report import QUIET
from rollway.loop.watch.run import LoopWatch, run
from rollway.records.engine import Published
from rollway.records.ids import Step
from rollway.rundir.rundir import RunDir
from rollway.transport.files import FileBatches


def opening_trainer(pipe: Connection, folder: str, steps: int) -> None:
    """Says of every step when all its columns lay open; publishes its version when told to."""
    run_dir = RunDir(folder)

    async def main(watch: LoopWatch) -> None:
        pipe.send("up")
        batches = FileBatches(run_dir, Step(1), steps)
        async for batch in batches:
            reader = batch.reader()
            for row in batch.manifest().rows:
                columns = reader.open(row.ref)
                assert len(columns[f"row{row.row}.token_ids"]) == row.num_tokens
                assert len(columns[f"row{row.row}.routes"]) == row.num_tokens
            del columns, reader
            pipe.send(time.time())
            await asyncio.to_thread(pipe.recv)
            weights = run_dir.weights_of(batch.version)
            weights.mkdir()
            await batches.publish(Published(batch.version, str(weights), {}))
        await asyncio.Event().wait()

    run("trainer", QUIET, main)
