"""The router: one address for clients, one for workers, and the decisions of `core.routing` between."""

import asyncio
import logging
import socket
from contextlib import ExitStack
from typing import Any

import zmq
import zmq.asyncio

from ..config.parts import RouterPart
from ..config.plan import env_name
from ..errors import ProtocolError
from ..loop.part import Parent, as_it_is, run_part
from ..records.ids import WorkerName
from ..records.lag import ProcessStats
from ..wire.messages import Stats, encode, for_router, split_frames
from .core.routing import (
    ClientGone,
    ClientSays,
    Event,
    Frame,
    Routing,
    TellClient,
    TellWorker,
    WorkerDied,
    WorkerSays,
)
from .supervisor import keep_alive

log = logging.getLogger(__name__)

HOST = "tcp://127.0.0.1"


class Router:
    """Performs what the core decides. Bad frames are counted, logged and dropped."""

    def __init__(self, env: str, clients: Any, workers: Any) -> None:
        self._core = Routing(env)
        self._clients = clients
        self._workers = workers
        self._num_bad = 0

    @property
    def num_owed(self) -> int:
        return self._core.num_owed

    async def on(self, event: Event) -> None:
        dropped = self._core.num_dropped
        commands = self._core.on_event(event)
        if self._core.num_dropped > dropped:
            log.warning("dropped message %d that nobody waits for", self._core.num_dropped)
        for command in commands:
            match command:
                case TellClient(client=client, message=message, frame=frame):
                    if not await self._send(self._clients, client, encode(message), frame):
                        await self.on(ClientGone(client))
                case TellWorker(worker=worker, message=message):
                    await self._send(self._workers, worker.encode(), encode(message))

    async def died(self, worker: WorkerName) -> None:
        await self.on(WorkerDied(worker))

    async def serve_clients(self) -> None:
        while True:
            sender, message, _ = await self._receive(self._clients)
            await self.on(ClientSays(sender, message))

    async def serve_workers(self) -> None:
        while True:
            sender, message, frame = await self._receive(self._workers)
            size = 0 if frame is None else len(frame)
            await self.on(WorkerSays(WorkerName(sender.decode()), message, frame, size))

    async def tell_stats(self, stats: ProcessStats) -> None:
        """This router's own statistics, for its clients."""
        await self.on(WorkerSays(WorkerName(""), Stats(stats)))

    async def _receive(self, wire: Any) -> tuple[bytes, Any, Frame]:
        """Who speaks, what it says, and the raw frame beside it, neither copied nor looked at."""
        while True:
            sender, *frames = await wire.recv_multipart(copy=False)
            try:
                return sender.bytes, *split_frames(frames, for_router)
            except ProtocolError as error:
                self._num_bad += 1
                log.warning("dropped bad frame %d: %s", self._num_bad, error)

    async def _send(self, wire: Any, peer: bytes, message: bytes, frame: Frame = None) -> bool:
        """Whether there is still somebody to send to."""
        parts = [peer, message] if frame is None else [peer, message, frame]
        try:
            await wire.send_multipart(parts, copy=frame is None)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            log.info("peer %s is gone", peer.decode(errors="replace"))
            return False
        return True


def _bind(context: Any, stack: ExitStack) -> tuple[Any, str]:
    """A ROUTER socket on a free loopback port. It never drops for being full: credits bound it."""
    wire = stack.enter_context(context.socket(zmq.ROUTER))
    wire.setsockopt(zmq.ROUTER_MANDATORY, 1)
    wire.setsockopt(zmq.SNDHWM, 0)
    wire.setsockopt(zmq.LINGER, 0)
    port = wire.bind_to_random_port(HOST)
    return wire, f"{HOST}:{port}"


async def router(part: RouterPart, parent: Parent) -> None:
    """Bind, start the workers, pass messages until the parent is gone."""
    with ExitStack() as stack:
        context = stack.enter_context(zmq.asyncio.Context())
        clients, client_address = _bind(context, stack)
        workers, worker_address = _bind(context, stack)
        me = Router(part.env.id, clients, workers)
        parent.in_flight, parent.on_stats = lambda: me.num_owed, me.tell_stats
        async with asyncio.TaskGroup() as tasks:
            jobs = [me.serve_clients(), me.serve_workers()]
            jobs += [
                keep_alive(f"{env_name(part.env.id)}.w{index}", part, worker_address, me.died)
                for index in range(part.env.workers)
            ]
            running = [tasks.create_task(job) for job in jobs]
            await parent.ready(client_address)
            while await parent.told() is not None:
                pass
            for task in running:
                task.cancel()


def main(name: str, sock: socket.socket) -> None:
    run_part(name, sock, RouterPart, as_it_is, router)
