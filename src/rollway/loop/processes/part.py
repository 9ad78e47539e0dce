"""A part of a run: an asynchronous child that says when it is ready, how late it runs, why it failed.

`run_part` is the child's side, `start_part` the parent's.
"""

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec
from msgspec import Struct

from ...config.specs import WatchSpec
from ...errors import PartDied, RollwayError
from ...records.lag import ProcessStats
from ...wire.pipe import AsyncPipe, BlockingPipe
from ..watch.run import LoopWatch, run
from . import child

STATS_EVERY_S = 1.0
LAST_LINES = 12


class PartReady(Struct, frozen=True, tag="ready"):
    """The part serves, at `address` if it has one."""

    address: str = ""


class PartStats(Struct, frozen=True, tag="stats"):
    """How a process does; a part also passes on what its own children say."""

    stats: ProcessStats


class PartFailure(Struct, frozen=True, tag="failure"):
    """The part ends because of this; one line for the user."""

    error: str


class PartMessage(Struct, frozen=True, tag="said"):
    """Something only this kind of part says: a struct of its own, encoded."""

    body: bytes


_decoder: msgspec.msgpack.Decoder[PartReady | PartStats | PartFailure | PartMessage] = (
    msgspec.msgpack.Decoder(PartReady | PartStats | PartFailure | PartMessage)
)
encode = msgspec.msgpack.encode


class PartSpec(Protocol):
    """What a part is given; it always says how the part's loop is watched."""

    @property
    def watch(self) -> WatchSpec: ...


C = TypeVar("C", bound=PartSpec)
R = TypeVar("R")


def as_it_is(config: C) -> C:
    """For parts that have nothing to prepare."""
    return config


class Parent:
    """A part's view of the process that started it."""

    def __init__(self, pipe: AsyncPipe, watch: LoopWatch) -> None:
        self._pipe = pipe
        self._watch = watch
        self.in_flight: Callable[[], int] = lambda: 0
        self.on_stats: Callable[[ProcessStats], Awaitable[None]] = self.stats

    async def ready(self, address: str = "") -> None:
        await self._pipe.send(encode(PartReady(address)))

    async def say(self, body: Struct) -> None:
        await self._pipe.send(encode(PartMessage(encode(body))))

    async def mention(self, body: Struct) -> None:
        """Say something that the next thing will replace: skipped while the parent does not read."""
        if not self._pipe.is_congested:
            await self.say(body)

    async def stats(self, stats: ProcessStats) -> None:
        """Newer figures follow, so a parent that does not read misses these and delays nothing."""
        if not self._pipe.is_congested:
            await self._pipe.send(encode(PartStats(stats)))

    @property
    def watch(self) -> LoopWatch:
        """For lanes: who hears of calls that take too long."""
        return self._watch

    def take_stats(self) -> ProcessStats:
        return self._watch.take(self.in_flight())

    async def told(self) -> bytes | None:
        """The next thing the parent says; None when it wants the part to end."""
        return await self._pipe.receive()

    async def gone(self) -> None:
        """Until the parent wants the part to end; for parts that it has nothing to say to."""
        while await self.told() is not None:
            pass


def run_part(
    name: str,
    sock: socket.socket,
    kind: type[C],
    prepare: Callable[[C], R],
    main: Callable[[R, Parent], Awaitable[None]],
) -> None:
    """Read this part's config, run `main` on a watched loop, exit with 0 only if it ended well.

    `prepare` loads what takes long, before there is a loop it could hold; `main` gets its result.
    """
    first = BlockingPipe(sock).receive()
    if first is None:
        return
    config = msgspec.msgpack.decode(first, type=kind)
    try:
        prepared = prepare(config)
    except RollwayError as error:
        BlockingPipe(sock).send(encode(PartFailure(str(error))))
        sys.exit(1)
    ok = run(name, config.watch, lambda watch: _live(prepared, sock, watch, main))
    sys.exit(0 if ok else 1)


async def _live(
    prepared: R,
    sock: socket.socket,
    watch: LoopWatch,
    main: Callable[[R, Parent], Awaitable[None]],
) -> bool:
    """`main` until it ends, the parent closes the pipe, or SIGTERM; True unless it failed."""
    sock.setblocking(False)
    pipe = await AsyncPipe.open(sock)
    parent = Parent(pipe, watch)
    work = asyncio.ensure_future(main(prepared, parent))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, work.cancel)
    beat = asyncio.create_task(_report_stats(parent, work))
    try:
        await work
        return True
    except asyncio.CancelledError:
        return True
    except Exception as error:  # whatever it is, the parent is told before this process ends
        logging.getLogger(watch.name).exception("ended by an error")
        cause = first_cause(error)
        shown = str(cause) if isinstance(cause, RollwayError) else ""
        await _last_words(pipe, shown)
        return False
    finally:
        beat.cancel()
        await pipe.close()


async def _last_words(pipe: AsyncPipe, error: str) -> None:
    try:
        await pipe.send(encode(PartFailure(error)))
    except ConnectionError:
        logging.getLogger(__name__).info("the parent was gone before it could be told")


async def _report_stats(parent: Parent, work: "asyncio.Future[None]") -> None:
    """Once a second, what this process knows of itself; a parent that is gone ends the work."""
    try:
        while True:
            await asyncio.sleep(STATS_EVERY_S)
            await parent.on_stats(parent.take_stats())
    except ConnectionError:
        work.cancel()


def first_cause(error: BaseException) -> BaseException:
    """The first leaf of nested exception groups: what to tell the user."""
    while isinstance(error, BaseExceptionGroup):
        rollway = [one for one in error.exceptions if isinstance(one, RollwayError)]
        error = rollway[0] if rollway else error.exceptions[0]
    return error


def how_it_ended(code: int) -> str:
    """An exit code in words."""
    return f"was killed by {child.signal_name(code)}" if code < 0 else f"exited with {code}"


class Part:
    """A started part, as its parent sees it."""

    def __init__(self, process: child.Child, log: Path | None) -> None:
        self.name = process.name
        self.pid = process.pid
        self._process = process
        self._log = log
        self._ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def was_ready(self) -> bool:
        return self._ready.done()

    async def ready(self) -> str:
        """The address it serves at, once it does."""
        return await asyncio.shield(self._ready)

    async def tell(self, body: Struct) -> None:
        await self._process.pipe.send(encode(body))

    async def mention(self, body: Struct) -> None:
        """Tell it something that the next thing will replace: skipped while it does not read."""
        if not self._process.pipe.is_congested:
            await self._process.pipe.send(encode(body))

    async def listen(self, on_stats: Callable[[ProcessStats], None],
                     on_said: Callable[[bytes], None]) -> None:  # fmt: skip
        """Pass on what the part says until it ends; raises PartDied unless it ended well."""
        error = ""
        while (frame := await self._process.pipe.receive()) is not None:
            match _decoder.decode(frame):
                case PartReady(address=address):
                    self._ready.set_result(address)
                case PartStats(stats=stats):
                    on_stats(stats)
                case PartFailure(error=error):
                    pass
                case PartMessage(body=body):
                    on_said(body)
        code = await self._process.wait()
        if code == 0 and self.was_ready:
            return
        raise PartDied(error or self._post_mortem(code), code=code)

    def kill(self) -> None:
        """At once, also if it is stopped; `listen` hears of it."""
        self._process.kill()

    def _post_mortem(self, code: int) -> str:
        how = how_it_ended(code)
        return f"{self.name} (pid {self.pid}) {how}" + (last_words_in(self._log) if self._log else "")


def last_words_in(log: Path) -> str:
    """What to add to the news of a death: the last lines of its log, if it has any."""
    lines = log.read_text(errors="replace").splitlines()[-LAST_LINES:]
    return f"; last lines of {log}:" + "".join(f"\n  | {line}" for line in lines) if lines else ""


@asynccontextmanager
async def start_part(
    name: str, entry: str, config: Any, *, log: Path | None = None, pass_fds: Sequence[int] = ()
) -> AsyncIterator[Part]:
    """Start a part and give it its config. Leaving the block ends it."""
    async with child.start(name, entry, log=log, pass_fds=pass_fds) as process:
        await process.begin_with(encode(config))
        yield Part(process, log)
