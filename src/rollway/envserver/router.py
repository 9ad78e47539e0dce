"""The router: one address for clients, one for workers, and the decisions of `core.routing` between."""

import asyncio
import logging
import socket
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import zmq
import zmq.asyncio

from ..config.parts import RouterPart
from ..config.plan import env_name
from ..errors import ProtocolError
from ..loop.part import Parent, as_it_is, run_part
from ..loop.seldom import is_news
from ..records.ids import WorkerName
from ..records.lag import ProcessStats
from ..wire.messages import Stats, ToRouter, encode, from_client, from_worker, split_frames
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
from .ports import open_clients, open_workers
from .supervisor import keep_alive

log = logging.getLogger(__name__)

TURN = 16
"""Messages taken in a row before everything else on this loop has its turn: a flood must not hold it."""


class Router:
    """Performs what the core decides. Bad frames are counted, logged and dropped."""

    def __init__(self, env: str, clients: Any, workers: Any, listener: Parent | None = None) -> None:
        """`listener` is a parent that has no wire to hear of this server's processes."""
        self._core = Routing(env)
        self._listener = listener
        self._clients = clients
        self._workers = workers
        self._num_taken = 0
        self._num_bad = 0
        self._num_gone = 0

    @property
    def num_owed(self) -> int:
        return self._core.num_owed

    async def on(self, event: Event) -> None:
        dropped = self._core.num_dropped
        commands = self._core.on_event(event)
        if is_news(dropped, self._core.num_dropped):
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
            sender, message, _ = await self._receive(self._clients, from_client)
            await self.on(ClientSays(sender, message))

    async def serve_workers(self) -> None:
        while True:
            sender, message, frame = await self._receive(self._workers, from_worker)
            size = 0 if frame is None else len(frame)
            if isinstance(message, Stats):
                await self.overhear(message.stats)
            name = WorkerName(sender.decode(errors="replace"))
            await self.on(WorkerSays(name, message, frame, size))

    async def tell_stats(self, stats: ProcessStats) -> None:
        """This router's own statistics, for its clients."""
        await self.overhear(stats)
        await self.on(WorkerSays(WorkerName(""), Stats(stats)))

    async def overhear(self, stats: ProcessStats) -> None:
        """Statistics of this server's processes, for the parent if it listens."""
        if self._listener is not None:
            with suppress(ConnectionError):  # it is gone, and this server ends with it
                await self._listener.stats(stats)

    async def _receive(
        self, wire: Any, decode: Callable[[memoryview], ToRouter]
    ) -> tuple[bytes, Any, Frame]:
        """Who speaks, what it says, and the raw frame beside it, neither copied nor looked at."""
        while True:
            sender, *frames = await wire.recv_multipart(copy=False)
            self._num_taken += 1
            if self._num_taken % TURN == 0:
                await asyncio.sleep(0)
            try:
                return sender.bytes, *split_frames(frames, decode)
            except ProtocolError as error:
                self._num_bad += 1
                if is_news(self._num_bad - 1, self._num_bad):
                    log.warning("dropped bad frame %d: %s", self._num_bad, error)

    async def _send(self, wire: Any, peer: bytes, message: bytes, frame: Frame = None) -> bool:
        """Whether there is still somebody to send to."""
        parts = [peer, message] if frame is None else [peer, message, frame]
        try:
            await wire.send_multipart(parts, copy=frame is None, flags=zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            self._num_gone += 1
            if is_news(self._num_gone - 1, self._num_gone):
                log.info("peer %s is gone (time %d)", ascii(peer), self._num_gone)
            return False
        return True


async def router(part: RouterPart, parent: Parent) -> None:
    """Bind, start the workers, pass messages until the parent is gone."""
    with ExitStack() as stack:
        context = stack.enter_context(zmq.asyncio.Context())
        clients = open_clients(context, stack, part.bind, part.keys)
        workers = open_workers(context, stack)
        listener = parent if part.tells_parent else None
        me = Router(part.env.id, clients.wire, workers.wire, listener)
        parent.in_flight, parent.on_stats = lambda: me.num_owed, me.tell_stats
        async with asyncio.TaskGroup() as tasks:
            jobs = [me.serve_clients(), me.serve_workers(), *(guard() for guard in clients.guards)]
            jobs += [
                keep_alive(f"{env_name(part.env.id)}.w{index}", part, workers.address, me.died)
                for index in range(part.env.workers)
            ]
            running = [tasks.create_task(job) for job in jobs]
            await parent.ready(clients.address)
            while await parent.told() is not None:
                pass
            for task in running:
                task.cancel()


def main(name: str, sock: socket.socket) -> None:
    run_part(name, sock, RouterPart, as_it_is, router)
