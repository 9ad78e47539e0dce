"""A run with payload, the orchestrator's end that serves it, and a connection that can be cut."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import numpy as np
import zmq
import zmq.asyncio

from rollway.config.load import check
from rollway.config.sections import TransportConfig, ZmqTransportConfig
from rollway.payload.blob import build
from rollway.payload.writer import SegmentWriter
from rollway.records.batch import BatchManifest, BatchRow
from rollway.records.ids import PolicyVersion, RolloutId, Step
from rollway.records.payload import SegmentName
from rollway.rundir.rundir import RunDir
from rollway.transport.batch import Batch, BatchSender
from rollway.transport.messages import FromTrainer, decode_for_trainer
from rollway.transport.open import WINDOW_BYTES, open_sender
from rollway.wire.messages import encode

LAST = 4
CONFIG = {
    "name": "run",
    "max_steps": LAST,
    "model": {"path": "m"},
    "env": [{"id": "reverse-text"}],
}
SOON_S = 20


def new_run(folder: Any) -> RunDir:
    run = RunDir(folder)
    run.create(check(CONFIG, "run.toml"))
    return run


async def batch_of(run: RunDir, step: int, blobs: int = 3, size: int = 1000) -> BatchManifest:
    """Write rollouts of two rows each to a segment. Their tokens encode step, rollout and row."""
    rows = []
    with SegmentWriter(run.payload, SegmentName(f"w{step}", 0), 1 << 30) as writer:
        for number in range(blobs):
            columns = {
                f"row{row}.token_ids": [np.full(size, tokens(step, number, row), np.int32)]
                for row in range(2)
            }
            ref = await writer.append(build(columns))
            name = RolloutId(f"g{step}.{number}")
            rows += [BatchRow(name, ref, row, size, size, float(row)) for row in range(2)]
    return BatchManifest(
        Step(step), PolicyVersion(step - 1), tuple(rows), ((tuple(range(len(rows))),),)
    )


def tokens(step: int, number: int, row: int) -> int:
    return 1000 * step + 10 * number + row


def check_batch(batch: Batch, step: int, blobs: int = 3) -> None:
    """Check that every column is there and is what was written."""
    assert batch.step == batch.version == step
    manifest, reader = batch.manifest(), batch.reader()
    seen = [int(np.unique(reader.row(row)["token_ids"]).item()) for row in manifest.rows]
    assert seen == [tokens(step, number, row) for number in range(blobs) for row in range(2)]


@asynccontextmanager
async def orchestrator(
    run: RunDir, *, window_bytes: int = WINDOW_BYTES, **settings: Any
) -> AsyncIterator[BatchSender]:
    """Serve batches as the orchestrator does, at a port. An error in there fails the test."""
    bound = {"bind": "tcp://127.0.0.1:*", **settings}
    config = TransportConfig(zmq=ZmqTransportConfig(**bound))
    with open_sender(run, config, Step(1), LAST, window_bytes) as sender:
        serving = asyncio.ensure_future(sender.serve())
        try:
            yield sender
        finally:
            serving.cancel()
            with suppress(asyncio.CancelledError):
                await serving


class RawTrainer:
    """The bare socket of a trainer: sends any message, any number of times."""

    def __init__(self, wire: Any) -> None:
        self.wire = wire

    async def send(self, *messages: FromTrainer | bytes) -> None:
        for message in messages:
            await self.wire.send(message if isinstance(message, bytes) else encode(message))

    async def receive(self) -> Any:
        return decode_for_trainer(
            await asyncio.wait_for(self.wire.recv_multipart(copy=False), SOON_S)
        )[0]

    async def gets_nothing(self) -> bool:
        return not await self.wire.poll(300)


@asynccontextmanager
async def raw_trainer(address: str) -> AsyncIterator[RawTrainer]:
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as wire:
        wire.setsockopt(zmq.LINGER, 0)
        wire.connect(address)
        yield RawTrainer(wire)


class Cable:
    """A TCP proxy in this process that can cut its connections and counts the bytes to the trainer."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._ends: list[asyncio.StreamWriter] = []
        self.num_connections = 0
        self.num_bytes = 0
        self.cut_at: float = float("inf")

    async def connect(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
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
                if counts:
                    self.num_bytes += len(data)
                if self.num_bytes > self.cut_at:
                    self.cut_at = float("inf")
                    self.cut()
                writer.write(data)
                await writer.drain()
        writer.close()

    def cut(self) -> None:
        ends, self._ends = self._ends, []
        for end in ends:
            end.transport.abort()


@asynccontextmanager
async def cable(address: str) -> AsyncIterator[tuple[Cable, str]]:
    """Yield a cable to `address`, and the address at which to connect to the cable."""
    proxy = Cable(int(address.rpartition(":")[2]))
    async with await asyncio.start_server(proxy.connect, "127.0.0.1", 0) as server:
        yield proxy, f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        proxy.cut()
