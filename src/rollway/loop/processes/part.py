"""A part of a run: an asynchronous child process that reports when it is ready, how late its loop is,
and why it failed. `run_part` is the child's side, `start_part` the parent's."""

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from ...config.specs import WatchSpec
from ...errors import UNREADABLE, PartDied, ProtocolError, RollwayError
from ...records.lag import ProcessStats
from ...wire.pipe import NOT_A_FRAME, AsyncPipe
from ..lanes.threads import thread
from ..watch.run import LoopWatch, run
from . import child
from .child_memory import child_rss

STATS_EVERY_S = 1.0
LAST_LINES = 12
ENDS_WITHIN_S = 30.0
"""A part that has closed its pipe has this long to end before it is killed."""
MAX_LOG_BYTES, LOOK_AT_LOG_S = 64 << 20, 5.0


class PartReady(Struct, frozen=True, tag="ready"):
    """The part serves, at `address` if it has one."""

    address: str = ""


class PartStats(Struct, frozen=True, tag="stats"):
    """The figures of the part, or of one of its child processes."""

    stats: ProcessStats


class PartFailure(Struct, frozen=True, tag="failure"):
    """The error that ends the part, as one line for the user. After a bug, the last lines of the log
    are shown as well."""

    error: str
    is_bug: bool = False


class PartMessage(Struct, frozen=True, tag="said"):
    """A message that only this kind of part sends: an encoded struct."""

    body: bytes


FromPart = PartReady | PartStats | PartFailure | PartMessage
_decode = msgspec.msgpack.Decoder[FromPart](FromPart).decode
encode = msgspec.msgpack.encode


class PartSpec(Protocol):
    """The struct a part is started with. It always says how the part's loop is watched."""

    @property
    def watch(self) -> WatchSpec: ...


S = TypeVar("S", bound=PartSpec)
R = TypeVar("R")


def unchanged(spec: S) -> S:
    """The `prepare` of parts that have nothing to prepare."""
    return spec


class Parent:
    """The process that started this part, as the part sees it."""

    def __init__(self, pipe: AsyncPipe, watch: LoopWatch) -> None:
        self._pipe = pipe
        self.watch = watch
        """Lanes report calls to it that take too long."""
        self.in_flight: Callable[[], int] = lambda: 0
        self.on_stats: Callable[[ProcessStats], Awaitable[None]] = self.report_stats

    async def report_ready(self, address: str = "") -> None:
        await self._pipe.send(encode(PartReady(address)))

    async def send(self, message: Struct) -> None:
        await self._pipe.send(encode(PartMessage(encode(message))))

    async def send_if_idle(self, message: Struct) -> None:
        """Send a message that the next one will replace; skip it while the parent does not read."""
        if not self._pipe.is_congested:
            await self.send(message)

    async def report_stats(self, stats: ProcessStats) -> None:
        """Send figures that newer ones will replace; skip them while the parent does not read."""
        if not self._pipe.is_congested:
            await self._pipe.send(encode(PartStats(stats)))

    def take_stats(self) -> ProcessStats:
        return self.watch.take(self.in_flight())

    async def receive(self) -> bytes | None:
        """Wait for the parent's next message; None means that the part has to end."""
        return await self._pipe.receive()

    async def wait_until_gone(self) -> None:
        """Wait until the part has to end; for parts that get no messages from their parent."""
        while await self.receive() is not None:
            pass


PartMain = Callable[[R, Parent], Awaitable[None]]
"""The work of a part: it gets what was prepared, and its parent."""


def run_part(
    name: str,
    sock: socket.socket,
    kind: type[S],
    prepare: Callable[[S], R],
    main: PartMain[R],
) -> None:
    """Read this part's spec, run `main` on a watched loop, and exit with 0 only if it ended well.
    `prepare` loads what takes long before there is a loop that it could hold; `main` gets its result."""
    pipe, spec = child.receive_spec(sock, kind)
    try:
        prepared = prepare(spec)
    except RollwayError as error:
        pipe.send(encode(PartFailure(str(error))))
        sys.exit(1)
    ok = run(name, spec.watch, lambda watch: _run_main(prepared, sock, watch, main))
    sys.exit(0 if ok else 1)


async def _run_main(
    prepared: R, sock: socket.socket, watch: LoopWatch, main: PartMain[R]
) -> bool:
    """Run `main` until it ends, the parent is gone, or SIGTERM arrives. Return False if it failed."""
    sock.setblocking(False)
    pipe = await AsyncPipe.open(sock)
    parent = Parent(pipe, watch)
    work = asyncio.ensure_future(main(prepared, parent))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, work.cancel)
    reporting = asyncio.create_task(_report_stats(parent, work))
    try:
        with suppress(asyncio.CancelledError):
            await work
        return True
    except Exception as error:  # the parent hears of any error before this process ends
        logging.getLogger(watch.name).exception("ended by an error")
        await _report_failure(pipe, first_cause(error))
        return False
    finally:
        reporting.cancel()
        await pipe.close()


async def _report_failure(pipe: AsyncPipe, cause: BaseException) -> None:
    """Send an error that the user can fix as it is. Of a bug, or a machine that fails, the class is told
    too: a full disk may have kept it out of the log."""
    failure = PartFailure(str(cause))
    if isinstance(cause, OSError) and cause.filename is not None:
        failure = PartFailure(f"cannot use {cause.filename}: {cause.strerror}")
    elif not isinstance(cause, RollwayError):
        failure = PartFailure(f"{type(cause).__name__}: {cause}", is_bug=True)
    try:
        await pipe.send(encode(failure))
    except ConnectionError:
        logging.getLogger(__name__).info(
            "the parent was gone before the error could be sent to it"
        )


async def _report_stats(parent: Parent, work: "asyncio.Future[None]") -> None:
    """Send this process's figures once a second. A parent that is gone ends the work."""
    try:
        while True:
            await asyncio.sleep(STATS_EVERY_S)
            children = await thread(child_rss) if child.RUNNING else {}
            await parent.on_stats(replace(parent.take_stats(), children=children))
    except ConnectionError:
        work.cancel()


def first_cause(error: BaseException) -> BaseException:
    """Return the first leaf of nested exception groups, the error to show to the user."""
    while isinstance(error, BaseExceptionGroup):
        causes = error.exceptions
        error = next(
            (cause for cause in causes if isinstance(cause, RollwayError)), causes[0]
        )
    return error


def describe_exit(code: int) -> str:
    return f"was killed by {child.signal_name(code)}" if code < 0 else f"exited with {code}"


def describe_death(process: child.Child, code: int, cause: str = "") -> str:
    """Say how a process ended, and what it wrote last."""
    lines = last_log_lines(process.log) if process.log else ""
    memory = ", probably because memory ran out" if process.was_out_of_memory else ""
    return f"{describe_exit(code)}{memory}{cause}{lines}"


class Part:
    """A started part, as its parent sees it."""

    def __init__(self, process: child.Child) -> None:
        self.name = process.name
        self.pid = process.pid
        self._process = process
        self._ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def was_ready(self) -> bool:
        return self._ready.done()

    async def ready(self) -> str:
        """Wait until the part serves; return its address."""
        return await asyncio.shield(self._ready)

    async def send(self, message: Struct) -> None:
        await self._process.pipe.send(encode(message))

    async def send_if_idle(self, message: Struct) -> None:
        """Send a message that the next one will replace; skip it while the part does not read."""
        if not self._process.pipe.is_congested:
            await self._process.pipe.send(encode(message))

    async def listen(
        self, on_stats: Callable[[ProcessStats], None], on_message: Callable[[bytes], None]
    ) -> None:
        """Pass on the part's messages until it ends. Raise PartDied unless it ended well."""
        error, cause = "", ""
        while (message := await self._next_message()) is not None:
            match message:
                case PartReady(address=address):
                    if not self.was_ready:
                        self._ready.set_result(address)
                case PartStats(stats=stats):
                    on_stats(stats)
                case PartFailure(error=text, is_bug=True):
                    cause = f" by {text}"
                case PartFailure(error=text):
                    error = text
                case PartMessage(body=body):
                    on_message(body)
        await self._process.end(ENDS_WITHIN_S)
        code = await self._process.wait()
        if code == 0 and self.was_ready:
            return
        if not error:
            died = describe_death(self._process, code, cause)
            error = f"{self.name} (pid {self.pid}) {died}"
        raise PartDied(error, code=code)

    async def _next_message(self) -> FromPart | None:
        """Return the part's next message; None when it has ended. A part that sends something else is
        killed: user code that writes to descriptors which are not its own may do so in a worker."""
        try:
            frame = await self._process.pipe.receive()
            return None if frame is None else _decode(frame)
        except (ProtocolError, *UNREADABLE):
            self.kill()
            code = await self._process.wait()
            raise PartDied(
                f"{self.name} (pid {self.pid}): {NOT_A_FRAME}", code=code
            ) from None

    def kill(self) -> None:
        """Kill the part at once, even if it is stopped. `listen` then raises."""
        self._process.kill()


def last_log_lines(log: Path) -> str:
    """Return the last lines of a log for the message about a dead process; empty if there are none."""
    try:
        lines = log.read_text(errors="replace").splitlines()[-LAST_LINES:]
    except OSError as error:
        return f"; its log {log} cannot be read: {error}"
    return "\n  | ".join([f"; last lines of {log}:", *lines]) if lines else ""


async def _keep_bounded(log: Path, look_every_s: float) -> None:
    """Bound a log while its process lives: user code may print without end."""
    while True:
        await asyncio.sleep(look_every_s)
        with suppress(OSError):
            await thread(cut_log, log, MAX_LOG_BYTES)


def cut_log(log: Path, most: int) -> None:
    """If a log has grown beyond this size, drop its second half: the first has the first error. What is
    written from then on follows."""
    if log.stat().st_size > most:
        os.truncate(log, most // 2)
        with log.open("ab") as file:
            file.write(
                f"\n… cut here, because this log had more than {most >> 20} MB\n".encode()
            )


@asynccontextmanager
async def start_part(
    name: str,
    entry: str,
    spec: Any,
    *,
    log: Path | None = None,
    pass_fds: Sequence[int] = (),
    look_at_log_s: float = LOOK_AT_LOG_S,
) -> AsyncIterator[Part]:
    """Start a part with its spec. Leaving the block ends it. A part that was never ready is killed at
    once: it has nothing to finish, and does not listen while it loads a model."""
    async with child.start(name, entry, log=log, pass_fds=pass_fds) as process:
        part, process.reports_itself = Part(process), True
        bounding = asyncio.create_task(_keep_bounded(log, look_at_log_s)) if log else None
        try:
            await process.send_spec(spec)
            yield part
        finally:
            if bounding is not None:
                bounding.cancel()
            if not part.was_ready:
                process.kill()
