"""A trainer that takes batches in, and trains nothing: it opens every row of each manifest."""

import asyncio
import time
from multiprocessing.connection import Connection

from loopback.report import QUIET
from rollway.loop.run import Watch, run
from rollway.payload.reader import SegmentReader
from rollway.records.ids import PolicyVersion, Step
from rollway.records.policy import Published
from rollway.rundir.rundir import RunDir
from rollway.transport import filesystem


def opening_trainer(pipe: Connection, folder: str, steps: int) -> None:
    """Says of every step when all its columns lay open; publishes its version when told to."""
    run_dir = RunDir(folder)

    async def main(watch: Watch) -> None:
        pipe.send("up")
        reader = SegmentReader(run_dir.payload)
        for step in range(1, steps + 1):
            path = await filesystem.next_manifest(run_dir, Step(step))
            for row in filesystem.read_manifest(path).rows:
                columns = reader.open(row.ref)
                assert len(columns[f"row{row.row}.token_ids"]) == row.num_tokens
                assert len(columns[f"row{row.row}.routes"]) == row.num_tokens
            del columns
            reader.forget()
            pipe.send(time.time())
            await asyncio.to_thread(pipe.recv)
            weights = run_dir.weights_of(PolicyVersion(step))
            weights.mkdir()
            await filesystem.publish(Published(PolicyVersion(step), str(weights), {}))
        await asyncio.Event().wait()

    run("trainer", QUIET, main)
