"""The other side of *inline* and *threads*: an orchestrator and a trainer of the kind in use.

Records arrive as msgpack, are unpacked into lists and arrays, and when the last has come the batch is
packed into one message that the trainer reads back.
"""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pybase64
import zmq
import zmq.asyncio

from loopback.report import QUIET
from loopback.threads import POOL
from rollway.loop.watch.run import LoopWatch, run


def unpack(frame: Any) -> dict[str, Any]:
    record = msgspec.msgpack.decode(frame)
    raw = pybase64.b64decode(record["routes"], validate=True)
    record["routes"] = np.frombuffer(raw, np.uint8).reshape(record.pop("shape"))
    return record


def pack(records: list[dict[str, Any]], path: Path) -> None:
    """Everything the trainer needs, in one message: the last token's routes are zero."""
    rows = [
        {
            "ids": record["ids"],
            "mask": record["mask"],
            "logprobs": record["logprobs"],
            "temperatures": [1.0] * len(record["ids"]),
            "advantage": 0.0,
            "routes": np.concatenate(
                [record["routes"], np.zeros_like(record["routes"][:1])]
            ).tobytes(),
            "shape": record["routes"].shape[1:],
        }
        for record in records
    ]  # fmt: skip
    path.write_bytes(msgspec.msgpack.encode(rows))


def read(path: Path) -> int:
    """The trainer: every row as arrays. Returns the bytes of routes."""
    total = 0
    for row in msgspec.msgpack.decode(path.read_bytes()):
        np.array(row["ids"], np.int32), np.array(row["logprobs"], np.float32)
        total += np.frombuffer(row["routes"], np.uint8).nbytes
    return total


def old_trainer(pipe: Connection) -> None:
    """Told a path, opens the batch there and says when it had."""
    while True:
        path = pipe.recv()
        pipe.send((read(Path(path)), time.time()))


def old_orchestrator(pipe: Connection, rollouts: int, path: str, inline: bool) -> None:
    """Says where it listens; then the moment the last record had come; then what its loop suffered."""

    async def do(call: Any, *args: Any) -> Any:
        return call(*args) if inline else await asyncio.to_thread(call, *args)

    async def main(watch: LoopWatch) -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(POOL))
        context = zmq.asyncio.Context()
        source = context.socket(zmq.PULL)
        pipe.send(source.bind_to_random_port("tcp://127.0.0.1"))
        records: list[dict[str, Any]] = []

        async def take(frame: zmq.Frame) -> None:
            records.append(await do(unpack, frame.buffer))

        async with asyncio.TaskGroup() as tasks:
            for _ in range(rollouts):
                tasks.create_task(take(await source.recv(copy=False)))
            settled_s = time.time()
        await do(pack, records, Path(path))
        pipe.send(settled_s)
        await asyncio.sleep(0.05)
        pipe.send(watch.take().lag)
        await asyncio.Event().wait()

    run("orchestrator", QUIET, main)
