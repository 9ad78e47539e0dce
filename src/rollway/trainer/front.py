"""The front of the trainer: takes batches, has the ranks train them, publishes the versions."""

import asyncio
import socket
from contextlib import AbstractAsyncContextManager

from msgspec import msgpack

from ..config.specs import OrchestratorAddress, TrainerSpec
from ..loop.processes.part import Parent, run_part, unchanged
from ..observe.report import Notice
from ..rundir.rundir import RunDir
from ..transport import Batches, open_batches
from .rank_team import RankTeam


def open_shipped(spec: TrainerSpec, address: str) -> AbstractAsyncContextManager[Batches]:
    """Open the batches at the orchestrator's address, or in the run directory if it has none."""
    zmq, run = spec.transport.zmq, RunDir(spec.run_dir)
    if not address or zmq is None:
        return open_batches(run.path, first=spec.first_step)
    landing = run.landing if zmq.payload == "frames" else None
    return open_batches(
        address, first=spec.first_step, landing=landing, keys=zmq.trainer_keys
    )


async def train_all(spec: TrainerSpec, ranks: RankTeam, address: str) -> None:
    """Take the batch of every step in order, train it, and publish its weights."""
    async with open_shipped(spec, address) as batches:
        async for batch in batches:
            published = await ranks.train(batch)
            await batches.publish(published)
            await ranks.forget_before(published)


async def trainer(spec: TrainerSpec, parent: Parent) -> None:
    async with RankTeam(spec, lambda text: parent.send(Notice(text))) as ranks:
        await parent.report_ready()
        frame = await parent.receive()
        if frame is None:
            return
        address = msgpack.decode(frame, type=OrchestratorAddress).address
        async with asyncio.TaskGroup() as tasks:
            training = tasks.create_task(train_all(spec, ranks, address))
            await parent.wait_until_gone()
            training.cancel()


def main(name: str, sock: socket.socket) -> None:
    run_part(name, sock, TrainerSpec, unchanged, trainer)
