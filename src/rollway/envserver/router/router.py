"""The router: one address for clients, one for workers, and the decisions of `core.routing` between."""

import asyncio
import logging
import signal
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import zmq
import zmq.asyncio

from ...config.address import check_bind
from ...config.specs import RouterSpec
from ...errors import ProtocolError
from ...loop.coroutines import FairLoop
from ...loop.processes.part import Parent, run_part, unchanged
from ...loop.watch.rarely import Rarely
from ...records.ids import WorkerName
from ...records.lag import ProcessStats
from ...wire.messages import (
    MAX_CLIENT_BYTES,
    ServerStats,
    ToRouter,
    encode,
    from_client,
    from_worker,
    split_frames,
)
from ...wire.port import BoundPort, PortBounds, open_port, open_router, private_address
from ..core.events import (
    ClientSays,
    ClientUnreachable,
    EndServer,
    Frame,
    KillWorker,
    LogNote,
    RetireWorker,
    RouterCommand,
    RouterEvent,
    RouterTick,
    StartWorker,
    StopServer,
    TellClient,
    TellWorker,
    WorkerSays,
)
from ..core.routing import Bounds, Routing
from .supervisor import Supervisor

log = logging.getLogger(__name__)

TICK_S = 0.25
LAST_WORDS_MS = 1000
"""How long answers may take to leave once the server has ended."""


class Router:
    """Performs what the core decides. Bad frames are counted, logged and dropped."""

    def __init__(
        self, core: Routing, clients: Any, workers: Any, supervisor: Supervisor,
        listener: Parent | None = None,
    ) -> None:  # fmt: skip
        """`listener` is a parent that has no wire to hear of this server's processes."""
        self._core = core
        self._listener = listener
        self._clients = clients
        self._workers = workers
        self._supervisor = supervisor
        self._bad_frames, self._gone_peers = Rarely(), Rarely()
        self._dropped, self._late = Rarely(), Rarely()
        self._changed = asyncio.Event()
        self._in_order = asyncio.Lock()
        """What an event commands is performed before the next event is looked at."""
        self._fair = FairLoop()

    @property
    def num_owed(self) -> int:
        return self._core.num_owed

    async def on(self, event: RouterEvent) -> None:
        async with self._in_order:
            await self._do(event)
        self._changed.set()

    async def _do(self, event: RouterEvent) -> None:
        commands = self._core.on_event(event)
        if self._dropped.rise_to(self._core.num_dropped):
            log.warning("dropped message %d that nobody expected", self._core.num_dropped)
        if self._late.rise_to(self._core.num_late):
            log.info("dropped late end %d of an attempt that was given up", self._core.num_late)
        for command in commands:
            await self._perform(command)
            await self._fair.breathe()

    async def _perform(self, command: RouterCommand) -> None:
        match command:
            case TellClient(client=client, message=message, frame=frame):
                if not await self._send(self._clients, client, encode(message), frame):
                    await self._do(ClientUnreachable(command))
            case TellWorker(worker=worker, message=message):
                await self._send(self._workers, worker.encode(), encode(message))
            case KillWorker(worker=worker, silent_s=silent_s):
                log.warning("%s was silent for %.1f s and is killed", worker, silent_s)
                await self._do(self._supervisor.kill(worker, silent_s))
            case StartWorker():
                log.info("work waits and every worker is full: one more is started")
                self._supervisor.open_place()
            case RetireWorker(worker=worker):
                log.info("%s has been idle for long and is ended", worker)
                self._supervisor.close_place(worker)
            case LogNote(text=text):
                log.warning("%s", text)

    async def serve_clients(self) -> None:
        while True:
            sender, message, _ = await self._receive(self._clients, from_client)
            await self.on(ClientSays(sender, message, time.monotonic()))
            await self._fair.breathe()

    async def serve_workers(self) -> None:
        while True:
            sender, message, frame = await self._receive(self._workers, from_worker)
            size = 0 if frame is None else len(frame)
            if isinstance(message, ServerStats):
                await self.overhear(message.stats)
            name = WorkerName(sender.decode(errors="replace"))
            await self.on(WorkerSays(name, message, frame, size, time.monotonic()))
            await self._fair.breathe()

    async def hear_deaths(self) -> None:
        while True:
            await self.on(await self._supervisor.deaths.get())

    async def tick(self) -> None:
        while True:
            await self.on(RouterTick(time.monotonic()))
            await asyncio.sleep(TICK_S)

    async def drain(self, limit_s: float) -> None:
        """Take nothing more, let rollouts finish, answer for those that do not."""
        log.info("told to end: %d rollouts may take up to %g s more", self.num_owed, limit_s)
        self._supervisor.close_all()
        await self.on(StopServer())
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while self._core.num_workers:
                    self._changed.clear()
                    await self._changed.wait()
        await self.on(EndServer())
        self._clients.setsockopt(zmq.LINGER, LAST_WORDS_MS)

    async def tell_stats(self, stats: ProcessStats) -> None:
        """This router's own statistics, for its clients."""
        await self.overhear(stats)
        await self.on(WorkerSays(WorkerName(""), ServerStats(stats)))

    async def overhear(self, stats: ProcessStats) -> None:
        """Statistics of this server's processes, for the parent if it listens."""
        if self._listener is not None:
            with suppress(ConnectionError):  # it is gone, and this server ends with it
                await self._listener.report_stats(stats)

    async def _receive(
        self, wire: Any, decode: Callable[[memoryview], ToRouter]
    ) -> tuple[bytes, Any, Frame]:
        """Who speaks, what it says, and the raw frame beside it, neither copied nor looked at."""
        while True:
            sender, *frames = await wire.recv_multipart(copy=False)
            await self._fair.breathe()
            try:
                return sender.bytes, *split_frames(frames, decode)
            except ProtocolError as error:
                if self._bad_frames.add():
                    log.warning("dropped bad frame %d: %s", self._bad_frames.count, error)

    async def _send(self, wire: Any, peer: bytes, message: bytes, frame: Frame = None) -> bool:
        """Whether there is still somebody to send to."""
        parts = [peer, message] if frame is None else [peer, message, frame]
        try:
            await wire.send_multipart(parts, copy=frame is None, flags=zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            if self._gone_peers.add():
                log.info("peer %s is gone (time %d)", ascii(peer), self._gone_peers.count)
            return False
        return True


def bounds(spec: RouterSpec) -> Bounds:
    server, limits = spec.env.local, spec.limits
    return Bounds(
        lease_s=server.lease_s,
        client_lease_s=limits.client_lease_s,
        max_waiting=limits.max_waiting,
        min_workers=server.min_workers or server.workers,
        max_workers=server.workers,
        idle_s=limits.idle_s,
    )


async def router(part: RouterSpec, parent: Parent) -> None:
    """Bind, start the workers, pass messages until the parent is gone or a signal says so."""
    signals: asyncio.Queue[None] = asyncio.Queue()
    for one in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(one, signals.put_nowait, None)
    with ExitStack() as stack:
        context = stack.enter_context(zmq.asyncio.Context())
        clients = open_clients(context, stack, part.bind, part.keys)
        workers = open_workers(context, stack)
        supervisor, limits = Supervisor(part, workers.address), bounds(part)
        listener = parent if part.reports_to_parent else None
        core = Routing(part.env.id, limits)
        me = Router(core, clients.wire, workers.wire, supervisor, listener)
        parent.in_flight, parent.on_stats = lambda: me.num_owed, me.tell_stats
        async with asyncio.TaskGroup() as tasks:
            jobs = [
                me.serve_clients(),
                me.serve_workers(),
                me.hear_deaths(),
                me.tick(),
                supervisor.run(),
                *(guard() for guard in clients.guards),
            ]
            running = [tasks.create_task(job) for job in jobs]
            for _ in range(limits.min_workers):
                supervisor.open_place()
            await parent.report_ready(clients.address)
            await _until_told_to_end(me, parent, signals, part.limits.drain_s)
            for task in running:
                task.cancel()


async def _until_told_to_end(
    me: Router, parent: Parent, signals: "asyncio.Queue[None]", drain_s: float
) -> None:
    """A signal lets rollouts finish; a second one, or the parent's end, does not wait for that."""
    async with asyncio.TaskGroup() as tasks:
        gone = tasks.create_task(parent.wait_until_gone())
        told = tasks.create_task(signals.get())
        await asyncio.wait([gone, told], return_when=asyncio.FIRST_COMPLETED)
        if not gone.done():
            draining = tasks.create_task(me.drain(drain_s))
            again = tasks.create_task(signals.get())
            await asyncio.wait([gone, draining, again], return_when=asyncio.FIRST_COMPLETED)
            draining.cancel()
            again.cancel()
        gone.cancel()
        told.cancel()


def main(name: str, sock: socket.socket) -> None:
    run_part(name, sock, RouterSpec, unchanged, router)


MAX_UNREAD = 100
"""Messages of one client that lie here unread; its further ones wait with it."""
MAX_UNSENT = 65_536
"""Messages that wait for one client; one that leaves so many unread is taken for gone."""


def open_workers(context: Any, stack: ExitStack) -> BoundPort:
    """Where workers connect, and nobody else can. It never drops for being full: credits bound it."""
    wire = open_router(context, stack)
    wire.setsockopt(zmq.SNDHWM, 0)
    address = stack.enter_context(private_address("workers"))
    wire.bind(address)
    return BoundPort(wire, address)


def open_clients(context: Any, stack: ExitStack, bind: str, keys: str | None) -> BoundPort:
    """Where clients connect. What one may send, and what may wait for it, is bounded; beyond this
    machine there must be keys."""
    check_bind(bind, keys)
    bounds = PortBounds(MAX_CLIENT_BYTES, MAX_UNREAD, MAX_UNSENT)
    return open_port(context, stack, bind, keys, bounds)
