"""A run with payload, an orchestrator's side that serves it, and a line between that can be cut."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import numpy as np
import zmq
import zmq.asyncio

from rollway.config.load import check
from rollway.config.sections import TransportConfig
from rollway.payload.blob import build
from rollway.payload.writer import SegmentWriter
from rollway.records.batch import BatchManifest, BatchRow
from rollway.records.ids import PolicyVersion, RolloutId, Step
from rollway.rundir.rundir import RunDir
from rollway.transport.batch import Batch, BatchSender
from rollway.transport.choose import open_shipping
from rollway.transport.messages import FromTrainer, encode, for_trainer

LAST = 4
CONFIG = {"name": "run", "max_steps": LAST, "model": {"path": "m"}, "env": [{"id": "reverse-text"}]}
SOON_S = 20


def new_run(folder: Any) -> RunDir:
    run = RunDir(folder)
    run.create(check(CONFIG, "run.toml"))
    return run


async def batch_of(run: RunDir, step: int, blobs: int = 3, size: int = 1000) -> BatchManifest:
    """Rollouts of two rows each, in a segment of the run's; their tokens tell step, rollout and row."""
    rows = []
    with SegmentWriter(run.payload, f"w{step}.0", 1 << 30) as writer:
        for number in range(blobs):
            columns = {
                f"row{row}.token_ids": [np.full(size, tokens(step, number, row), np.int32)]
                for row in range(2)
            }
            ref = await writer.append(build(columns))
            name = RolloutId(f"g{step}.{number}")
            rows += [BatchRow(name, ref, row, size, size, float(row)) for row in range(2)]
    return BatchManifest(Step(step), PolicyVersion(step - 1), tuple(rows), ((tuple(range(len(rows))),),))


def tokens(step: int, number: int, row: int) -> int:
    return 1000 * step + 10 * number + row


def check_batch(batch: Batch, step: int, blobs: int = 3) -> None:
    """That every column is there, and is what was written."""
    assert batch.step == batch.version == step
    manifest, reader = batch.manifest(), batch.reader()
    seen = [int(np.unique(reader.row(row)["token_ids"]).item()) for row in manifest.rows]
    assert seen == [tokens(step, number, row) for number in range(blobs) for row in range(2)]


@asynccontextmanager
async def orchestrator(run: RunDir, *, first: int = 1, **wants: Any) -> AsyncIterator[BatchSender]:
    """The orchestrator's side, serving; what goes wrong there fails the test."""
    config = TransportConfig(manifests="zmq", **wants)
    with open_shipping(run, config, Step(first), LAST) as shipping:
        serving = asyncio.ensure_future(shipping.serve())
        try:
            yield shipping
        finally:
            serving.cancel()
            with suppress(asyncio.CancelledError):
                await serving


class RawTrainer:
    """A trainer's bare socket: says what it is told to, as often as it is told to."""

    def __init__(self, wire: Any) -> None:
        self.wire = wire

    async def say(self, *messages: FromTrainer | bytes) -> None:
        for one in messages:
            await self.wire.send(one if isinstance(one, bytes) else encode(one))

    async def hear(self) -> Any:
        return for_trainer(await asyncio.wait_for(self.wire.recv_multipart(copy=False), SOON_S))[0]

    async def is_silent(self) -> bool:
        return not await self.wire.poll(300)


@asynccontextmanager
async def raw_trainer(address: str) -> AsyncIterator[RawTrainer]:
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as wire:
        wire.setsockopt(zmq.LINGER, 0)
        wire.connect(address)
        yield RawTrainer(wire)


class Cable:
    """A TCP connection through this process: it can be cut, and counts the bytes towards the trainer."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._ends: list[asyncio.StreamWriter] = []
        self.num_connections = 0
        self.num_bytes = 0
        self.cut_at: float = float("inf")

    async def connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._ends += [writer, up_writer]
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._pass(reader, up_writer, counts=False))
            tasks.create_task(self._pass(up_reader, writer, counts=True))

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, counts: bool
    ) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                self.num_bytes += len(data) * counts
                if self.num_bytes > self.cut_at:
                    self.cut_at = float("inf")
                    self.cut()
                writer.write(data)
                await writer.drain()
        writer.close()

    def cut(self) -> None:
        ends, self._ends = self._ends, []
        for one in ends:
            one.transport.abort()


@asynccontextmanager
async def cable(address: str) -> AsyncIterator[tuple[Cable, str]]:
    """A cable to `address`, and where to connect to it."""
    one = Cable(int(address.rpartition(":")[2]))
    async with await asyncio.start_server(one.connect, "127.0.0.1", 0) as server:
        yield one, f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        one.cut()
