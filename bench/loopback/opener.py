"""A trainer that takes a batch in, and trains nothing: it opens every row of the manifest."""

import asyncio
import time
from multiprocessing.connection import Connection

from rollway.config.sections import WatchConfig
from rollway.loop.run import Watch, run
from rollway.payload.reader import SegmentReader
from rollway.records.ids import PolicyVersion, Step
from rollway.records.policy import Published
from rollway.rundir.rundir import RunDir
from rollway.transport import filesystem


def opening_trainer(pipe: Connection, folder: str) -> None:
    """Says when all columns of step 1 lay open; publishes version 1 when told to."""
    run_dir = RunDir(folder)

    async def main(watch: Watch) -> None:
        pipe.send("up")
        path = await filesystem.next_manifest(run_dir, Step(1))
        manifest = filesystem.read_manifest(path)
        reader = SegmentReader(run_dir.payload)
        for row in manifest.rows:
            columns = reader.open(row.ref)
            assert len(columns[f"row{row.row}.token_ids"]) == row.num_tokens
            assert len(columns[f"row{row.row}.routes"]) == row.num_tokens
        pipe.send(time.time())
        await asyncio.to_thread(pipe.recv)
        weights = run_dir.weights_of(PolicyVersion(1))
        weights.mkdir()
        await filesystem.publish(Published(PolicyVersion(1), str(weights), {}))
        await asyncio.Event().wait()

    run("trainer", WatchConfig(stall_ms=1e6), main)
