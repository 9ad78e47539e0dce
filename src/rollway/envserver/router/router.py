"""The router: passes messages between clients and workers, as `core.routing` decides."""

import asyncio
import logging
import signal
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import zmq
from zmq.asyncio import Context, Socket

from ...config.address import check_bind
from ...config.specs import RouterSpec
from ...errors import ProtocolError
from ...loop.coroutines import FairLoop, run_until_first
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
from ...wire.port import (
    BoundPort,
    PortBounds,
    open_port,
    open_router,
    private_address,
    send_to,
)
from ..core.events import (
    ClientMessage,
    ClientUnreachable,
    EndServer,
    Frame,
    KillWorker,
    LogNote,
    RetireWorker,
    RouterCommand,
    RouterEvent,
    RouterStats,
    RouterTick,
    SendToClient,
    SendToWorker,
    StartWorker,
    StopServer,
    WorkerMessage,
)
from ..core.routing import Routing
from .supervisor import Supervisor

log = logging.getLogger(__name__)

TICK_S = 0.25
LINGER_MS = 1000
"""How long the last answers may take to leave once the server has ended."""


class Router:
    """Performs what the core decides. `listener` is a parent that cannot get statistics as a client."""

    def __init__(
        self, core: Routing, clients: Socket, workers: Socket,
        supervisor: Supervisor, listener: Parent | None = None,
    ) -> None:  # fmt: skip
        self._core = core
        self._listener = listener
        self._clients = clients
        self._workers = workers
        self._supervisor = supervisor
        self._bad_frames, self._gone_peers = Rarely(), Rarely()
        self._dropped, self._late = Rarely(), Rarely()
        self._changed = asyncio.Event()
        self._lock = asyncio.Lock()
        """All commands of one event are performed before the core sees the next event."""
        self._fair = FairLoop()

    async def on(self, event: RouterEvent) -> None:
        async with self._lock:
            await self._handle(event)
        self._changed.set()

    async def _handle(self, event: RouterEvent) -> None:
        commands = self._core.on_event(event)
        if self._dropped.rise_to(self._core.num_dropped):
            log.warning("dropped unexpected message %d", self._core.num_dropped)
        if self._late.rise_to(self._core.num_late):
            log.info(
                "dropped late end %d of an attempt that was given up", self._core.num_late
            )
        for command in commands:
            await self._perform(command)
            await self._fair.breathe()

    async def _perform(self, command: RouterCommand) -> None:
        match command:
            case SendToClient(client, message, frame):
                if not await self._send(self._clients, client, encode(message), frame):
                    await self._handle(ClientUnreachable(command))
            case SendToWorker(worker, message):
                await self._send(self._workers, worker.encode(), encode(message))
            case KillWorker(worker, silent_s):
                await self._handle(self._supervisor.kill(worker, silent_s))
            case StartWorker():
                log.info("rollouts wait and every worker is full: starting one more worker")
                self._supervisor.open_place()
            case RetireWorker(worker):
                log.info("%s has been idle for long: ending it", worker)
                self._supervisor.close_place(worker)
            case LogNote(text):
                log.warning("%s", text)

    async def serve_clients(self) -> None:
        while True:
            sender, message, _ = await self._receive(self._clients, from_client)
            await self.on(ClientMessage(sender, message, time.monotonic()))

    async def serve_workers(self) -> None:
        while True:
            sender, message, frame = await self._receive(self._workers, from_worker)
            size = 0 if frame is None else len(frame)
            if isinstance(message, ServerStats):
                await self._report_to_parent(message.stats)
            name = WorkerName(sender.decode(errors="replace"))
            await self.on(WorkerMessage(name, message, frame, size, time.monotonic()))

    async def hear_deaths(self) -> None:
        while True:
            await self.on(await self._supervisor.deaths.get())

    async def tick(self) -> None:
        while True:
            await self.on(RouterTick(time.monotonic()))
            await asyncio.sleep(TICK_S)

    async def drain(self, limit_s: float) -> None:
        """Take no more rollouts, let running ones finish, and cancel those that take too long."""
        log.info("ending: %d rollouts may take up to %g s more", self._core.num_open, limit_s)
        self._supervisor.close_all()
        await self.on(StopServer())
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while self._core.num_workers:
                    self._changed.clear()
                    await self._changed.wait()
        await self.on(EndServer())
        self._clients.setsockopt(zmq.LINGER, LINGER_MS)

    async def send_stats(self, stats: ProcessStats) -> None:
        """Send this router's own statistics to its clients and to its parent."""
        await self._report_to_parent(stats)
        await self.on(RouterStats(stats))

    async def _report_to_parent(self, stats: ProcessStats) -> None:
        if self._listener is not None:
            # if the parent is gone, this server ends with it
            with suppress(ConnectionError):
                await self._listener.report_stats(stats)

    async def _receive(
        self, wire: Socket, decode: Callable[[memoryview], ToRouter]
    ) -> tuple[bytes, Any, Frame]:
        """Return the sender, its message, and the raw frame beside it, which is not copied."""
        while True:
            sender, *frames = await wire.recv_multipart(copy=False)
            await self._fair.breathe()
            try:
                return sender.bytes, *split_frames(frames, decode)
            except ProtocolError as error:
                if self._bad_frames.add():
                    log.warning("dropped bad frame %d: %s", self._bad_frames.count, error)

    async def _send(
        self, wire: Socket, peer: bytes, message: bytes, frame: Frame = None
    ) -> bool:
        is_sent = await send_to(wire, peer, message, frame)
        if not is_sent and self._gone_peers.add():
            log.info("peer %s is gone (time %d)", ascii(peer), self._gone_peers.count)
        return is_sent


async def router(part: RouterSpec, parent: Parent) -> None:
    """Bind, start the workers, and pass messages until the parent is gone or a signal arrives."""
    signals: asyncio.Queue[None] = asyncio.Queue()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, signals.put_nowait, None)
    with ExitStack() as stack:
        context = stack.enter_context(Context())
        clients = open_clients(context, stack, part.bind, part.keys)
        workers = open_workers(context, stack)
        supervisor = Supervisor(part, workers.address)
        listener = parent if part.reports_to_parent else None
        core = Routing(part.env.id, part.env.local, part.limits, part.terms)
        serving = Router(core, clients.wire, workers.wire, supervisor, listener)
        parent.in_flight, parent.on_stats = lambda: core.num_open, serving.send_stats
        async with asyncio.TaskGroup() as tasks:
            jobs = [
                serving.serve_clients(),
                serving.serve_workers(),
                serving.hear_deaths(),
                serving.tick(),
                supervisor.run(),
                *(guard() for guard in clients.guards),
            ]
            running = [tasks.create_task(job) for job in jobs]
            for _ in range(core.min_workers):
                supervisor.open_place()
            await parent.report_ready(clients.address)
            await _serve_until_end(serving, parent, signals, part.limits.drain_s)
            for task in running:
                task.cancel()


async def _serve_until_end(
    serving: Router, parent: Parent, signals: "asyncio.Queue[None]", drain_s: float
) -> None:
    """Wait for a signal, then let rollouts finish. A second signal or the parent's end cuts it short."""

    async def drain_after_signal() -> None:
        await signals.get()
        await run_until_first(serving.drain(drain_s), signals.get())

    await run_until_first(parent.wait_until_gone(), drain_after_signal())


def main(name: str, sock: socket.socket) -> None:
    run_part(name, sock, RouterSpec, unchanged, router)


MAX_UNREAD = 100
"""Messages of one client that the router may hold unread. Further ones wait at the client."""
MAX_UNSENT = 65_536
"""Messages that may wait for one client. A client that leaves more unread counts as gone."""


def open_workers(context: Any, stack: ExitStack) -> BoundPort:
    """Open the socket that workers connect to, in a folder that only this user can reach. It has no
    limit at which it drops messages, because credits bound their number."""
    wire = open_router(context, stack)
    wire.setsockopt(zmq.SNDHWM, 0)
    address = stack.enter_context(private_address("workers"))
    wire.bind(address)
    return BoundPort(wire, address)


def open_clients(
    context: Any, stack: ExitStack, bind: str | None, keys: str | None
) -> BoundPort:
    """Open the socket that clients connect to. A port requires keys. The socket bounds what a client may
    send and what may wait for it."""
    check_bind(bind, keys)
    bounds = PortBounds(MAX_CLIENT_BYTES, MAX_UNREAD, MAX_UNSENT)
    return open_port(context, stack, bind, keys, bounds)
