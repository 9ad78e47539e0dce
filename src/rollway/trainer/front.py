"""The trainer's process: takes batches, has the cores train them, publishes the versions."""

import asyncio
import socket
from contextlib import AbstractAsyncContextManager

import msgspec

from ..config.specs import OrchestratorAddress, TrainerSpec
from ..loop.processes.part import Parent, as_it_is, run_part
from ..rundir.rundir import RunDir
from ..transport import Batches, open_batches
from .rank_processes import RankProcesses, start_ranks


def batches_of(part: TrainerSpec, address: str) -> AbstractAsyncContextManager[Batches]:
    """At the address of the orchestrator, or in the run directory if it has none."""
    zmq, run = part.transport.zmq, RunDir(part.run_dir)
    if not address or zmq is None:
        return open_batches(run.path, first=part.first_step)
    landing = run.landing if zmq.payload == "frames" else None
    return open_batches(address, first=part.first_step, landing=landing, keys=zmq.trainer_keys)


async def train_all(part: TrainerSpec, cores: RankProcesses, address: str) -> None:
    """Every step in order: its batch, its weights, its publication."""
    async with batches_of(part, address) as batches:
        async for batch in batches:
            await batches.publish(await cores.train(batch))


async def trainer(part: TrainerSpec, parent: Parent) -> None:
    """Train until the last step is published and the parent is gone."""
    async with start_ranks(part) as cores:
        await parent.ready()
        told = await parent.told()
        if told is None:
            return
        address = msgspec.msgpack.decode(told, type=OrchestratorAddress).address
        async with asyncio.TaskGroup() as tasks:
            training = tasks.create_task(train_all(part, cores, address))
            await parent.gone()
            training.cancel()


def main(name: str, sock: socket.socket) -> None:
    run_part(name, sock, TrainerSpec, as_it_is, trainer)
