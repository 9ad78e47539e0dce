"""Keeps an environment's workers alive: starts them, notices their death at once, starts them anew."""

import asyncio
import logging
import signal
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from ...config.plan import env_name
from ...config.specs import RouterSpec, WorkerSpec
from ...errors import PartDied
from ...loop.processes.part import Part, describe_exit, start_part
from ...loop.processes.running_code import RunningCodePage, new_page
from ...records.ids import WorkerName
from ..core.events import RunningCode, WorkerDied, WorkerSilent

log = logging.getLogger(__name__)

WORKER = "rollway.envserver.worker.worker:main"
MAX_NEVER_READY = 3
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 10.0
"""Between two tries to start, each time twice as long, …"""
LONGEST_AFTER_LIFE_S = 2.0
"""… but no longer than this after a worker that had started: others wait for its place."""
HEALTHY_S = 30.0
"""A worker that lived this long restarts without the back-off of those before it."""


class NeverReady(PartDied):
    """A worker ended by itself before it could run anything: it cannot start."""


class _Alive(Struct, frozen=True):
    part: Part
    board: RunningCodePage


class _Place:
    """Where workers live one after the other: `w3.0`, then `w3.1` after its first death, and so on."""

    def __init__(self) -> None:
        self.closed = asyncio.Event()
        self.never_ready = 0
        self._pause_s = FIRST_PAUSE_S

    async def pause(self, lived_s: float) -> None:
        """Before the next start, longer each time; a place that closes waits for nothing."""
        pause_s = FIRST_PAUSE_S if lived_s > HEALTHY_S else self._pause_s
        longest_s = LONGEST_PAUSE_S if self.never_ready else LONGEST_AFTER_LIFE_S
        self._pause_s = min(2 * pause_s, longest_s)
        with suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self.closed.wait()


class Supervisor:
    """The workers of one server. `deaths` says which died, and whose code was running then."""

    def __init__(self, server: RouterSpec, address: str) -> None:
        self._server = server
        self._address = address
        self._places: dict[int, _Place] = {}
        self._started: Counter[int] = Counter()
        self._alive: dict[WorkerName, _Alive] = {}
        self._to_open: asyncio.Queue[int] = asyncio.Queue()
        self.deaths: asyncio.Queue[WorkerDied] = asyncio.Queue()

    async def run(self) -> None:
        """Keep every open place alive, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                tasks.create_task(self._keep_alive(await self._to_open.get()))

    def open_place(self) -> None:
        index = next(index for index in range(len(self._places) + 1) if index not in self._places)
        self._places[index] = _Place()
        self._to_open.put_nowait(index)

    def close_place(self, worker: WorkerName) -> None:
        """When this worker ends, none follows it."""
        place = self._places.get(int(worker.rpartition(".w")[2].partition(".")[0]))
        if place is not None:
            place.closed.set()

    def close_all(self) -> None:
        for place in self._places.values():
            place.closed.set()

    def kill(self, worker: WorkerName, silent_s: float) -> WorkerSilent:
        """End a worker that says nothing, having looked at what it does."""
        alive = self._alive.get(worker)
        if alive is None:
            return WorkerSilent(worker, silent_s)
        seen = WorkerSilent(worker, silent_s, _is_stopped(alive.part.pid), _mark(alive.board))
        alive.part.kill()
        return seen

    async def _keep_alive(self, index: int) -> None:
        """One that dies before it is ready would die again: while no other is up, that ends the server,
        at once the first time, later after a few tries."""
        place = self._places[index]
        base = f"{env_name(self._server.env.id)}.w{index}"
        while not place.closed.is_set():
            name = WorkerName(f"{base}.{self._started[index]}")
            self._started[index] += 1
            started_s = time.monotonic()
            try:
                died = await self._live(name, base)
                place.never_ready = 0
            except NeverReady as error:
                place.never_ready += 1
                is_hopeless = name.endswith(".0") or place.never_ready >= MAX_NEVER_READY
                if is_hopeless and not self._is_any_up:
                    raise
                log.warning("%s could not start: %s", name, error)
                died = WorkerDied(name, "could not start")
            if not (place.closed.is_set() and died.how == DRAINED):
                await self.deaths.put(died)
            await place.pause(time.monotonic() - started_s)
        del self._places[index]

    @property
    def _is_any_up(self) -> bool:
        return any(alive.part.was_ready for alive in self._alive.values())

    async def _live(self, name: WorkerName, base: str) -> WorkerDied:
        """One worker, from its start to its death."""
        log_path = Path(self._server.log_dir) / f"{base}.log"
        with new_page() as (board, fd):
            is_first = name.endswith(".0") and not self._is_any_up
            part = WorkerSpec(name, self._address, fd, self._server, is_patient=not is_first)
            async with start_part(base, WORKER, part, log=log_path, pass_fds=[fd]) as worker:
                self._alive[name] = _Alive(worker, board)
                try:
                    await worker.listen(on_stats=lambda stats: None, on_message=lambda body: None)
                except PartDied as error:
                    if not (worker.was_ready or error.was_killed):
                        raise NeverReady(str(error)) from None
                    log.warning("%s", error)
                    how, by_sigkill = describe_exit(error.code), error.code == -signal.SIGKILL
                    return WorkerDied(name, how, by_sigkill, _mark(board))
                finally:
                    del self._alive[name]
        return WorkerDied(name, DRAINED)


DRAINED = "ended"
"""How a worker died that had finished: it said so itself, on the wire, behind all it had to say."""


def _mark(board: RunningCodePage) -> RunningCode | None:
    shown = board.read()
    return RunningCode(shown.owner, shown.held_s, shown.where) if shown else None


def _is_stopped(pid: int) -> bool:
    """Whether a process was stopped from outside (SIGSTOP, a debugger). Known on Linux only."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    return False
