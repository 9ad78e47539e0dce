"""A rank without torch: a real process that takes the place of a rank, and dies of certain rows."""

import os
import signal
import socket

from msgspec import msgpack

from rollway.loop.processes.child import receive_spec
from rollway.records.engine import Published
from rollway.rundir.rundir import RunDir
from rollway.trainer.rank_processes import RankDone, RankOrder, RankStart

ENTRY = f"{__name__}:serve_mortal_rank"
KILLS = [77, 77, 77]
"""A row that contains these tokens, one after the other, kills the process that reads it."""


def serve_mortal_rank(name: str, sock: socket.socket) -> None:
    pipe, start = receive_spec(sock, RankStart)
    run = RunDir(start.spec.run_dir)
    pipe.send(msgpack.encode(RankDone(packing="packed")))
    while (frame := pipe.receive()) is not None:
        order = msgpack.decode(frame, type=RankOrder)
        if _contains_curse(order):
            os.kill(os.getpid(), signal.SIGSEGV)
        batch = order.batch
        folder = str(run.weights_of(batch.version))
        published = Published(batch.version, folder, {"loss": 1.0}, None)
        done = RankDone(published) if order.purpose == "train" else RankDone()
        pipe.send(msgpack.encode(done))


def _contains_curse(order: RankOrder) -> bool:
    manifest, reader = order.batch.manifest().without(order.without), order.batch.reader()
    planned = {index for rows in manifest.micro_batches for index in rows}
    for index in planned:
        row = manifest.rows[index]
        ids = reader.open(row.ref)[f"row{row.row}.token_ids"].tolist()
        if " ".join(map(str, KILLS)) in " ".join(map(str, ids)):
            return True
    return False
