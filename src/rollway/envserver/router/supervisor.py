"""Keeps an environment's workers alive: starts them, notices when one dies, and starts another."""

import asyncio
import logging
import signal
import time
from collections import Counter, deque
from contextlib import suppress
from pathlib import Path

from ...config.plan import env_name
from ...config.specs import RouterSpec, WorkerSpec
from ...envs.registry import read_source
from ...errors import PartDied, RollwayError
from ...loop.lanes.threads import thread
from ...loop.processes.part import Part, describe_exit, start_part
from ...loop.processes.running_code import RunningCodePage, new_page
from ...records.ids import WorkerName
from ..core.events import RunningCode, WorkerDied, WorkerSilent

log = logging.getLogger(__name__)

WORKER = "rollway.envserver.worker.worker:main"
MAX_NEVER_READY = 3
"""A place whose workers failed to start this many times in a row ends the server, if no worker is up."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 10.0
"""The pause before a place starts its next worker. It doubles each time."""
LONGEST_AFTER_LIFE_S = 2.0
"""The longest pause after a worker that had started: rollouts wait for its place."""
HEALTHY_S = 30.0
"""After a worker that lived this long, the pause is the first one again."""


class NeverReady(PartDied):
    """A worker ended before it could run anything, and was not killed: it cannot start."""


class _Place:
    """Holds one worker at a time: `w3.0`, then `w3.1` after the first one has died, and so on."""

    def __init__(self) -> None:
        self.closed = asyncio.Event()
        self.num_never_ready = 0
        self.workers: deque[WorkerName] = deque(maxlen=2)
        """The last two workers. The router may still speak of one whose death it has not heard of."""
        self._pause_s = FIRST_PAUSE_S

    async def pause(self, lived_s: float) -> None:
        """Wait before the next start, longer each time, or until the place is closed."""
        pause_s = FIRST_PAUSE_S if lived_s > HEALTHY_S else self._pause_s
        longest_s = LONGEST_PAUSE_S if self.num_never_ready else LONGEST_AFTER_LIFE_S
        self._pause_s = min(2 * pause_s, longest_s)
        with suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self.closed.wait()


class Supervisor:
    """The workers of one server. `deaths` says which died, and whose code was running then."""

    def __init__(self, server: RouterSpec, address: str) -> None:
        self._server = server
        self._source = read_source(server.env.id)
        self._address = address
        self._places: dict[int, _Place] = {}
        self._num_started: Counter[int] = Counter()
        """Workers by the number of their place. A place that is opened again continues to count."""
        self._running: dict[WorkerName, tuple[Part, RunningCodePage]] = {}
        self._to_open: asyncio.Queue[int] = asyncio.Queue()
        self.deaths: asyncio.Queue[WorkerDied] = asyncio.Queue()

    async def run(self) -> None:
        """Keep a worker alive in every open place, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                tasks.create_task(self._keep_alive(await self._to_open.get()))

    def open_place(self) -> None:
        number = min(set(range(len(self._places) + 1)) - self._places.keys())
        self._places[number] = _Place()
        self._to_open.put_nowait(number)

    def close_place(self, worker: WorkerName) -> None:
        """Start no other worker in the place of this one after it ends."""
        for place in self._places.values():
            if worker in place.workers:
                place.closed.set()

    def close_all(self) -> None:
        for place in self._places.values():
            place.closed.set()

    def kill(self, worker: WorkerName, silent_s: float) -> WorkerSilent:
        """Kill a worker that is silent. Return what could be seen of it before."""
        if worker not in self._running:
            return WorkerSilent(worker, silent_s)
        part, board = self._running[worker]
        seen = WorkerSilent(worker, silent_s, _is_stopped(part.pid), _running_code(board))
        part.kill()
        return seen

    async def _keep_alive(self, number: int) -> None:
        """Start one worker after the other in a place. A worker that dies before it is ready would die
        again. While no other worker is up, that ends the server: at once if it is the place's first
        worker, later after a few tries."""
        place = self._places[number]
        while not place.closed.is_set():
            life = self._num_started[number]
            self._num_started[number] += 1
            started_s = time.monotonic()
            try:
                died = await self._live(number, life)
                place.num_never_ready = 0
            except NeverReady as error:
                place.num_never_ready += 1
                is_hopeless = life == 0 or place.num_never_ready >= MAX_NEVER_READY
                if is_hopeless and not self._is_any_up:
                    raise
                name = place.workers[-1]
                log.warning("%s could not start: %s", name, error)
                died = WorkerDied(name, "could not start")
            except OSError as error:  # of this process: it has no descriptors or memory left
                if not self._is_any_up and life == 0:
                    raise
                log.warning("no worker can be started: %s", error)
                if place.workers:  # the router does nothing if it has heard of this death
                    await self.deaths.put(WorkerDied(place.workers[-1], f"was lost: {error}"))
                await place.pause(time.monotonic() - started_s)
                continue
            if not (place.closed.is_set() and died.how == DRAINED):
                await self.deaths.put(died)
            await place.pause(time.monotonic() - started_s)
        del self._places[number]

    async def _was_edited(self) -> bool:
        try:
            return await thread(read_source, self._server.env.id) != self._source
        except (OSError, RollwayError):  # it was removed, or cannot be opened now
            return False

    @property
    def _is_any_up(self) -> bool:
        return any(part.was_ready for part, _ in self._running.values())

    async def _live(self, number: int, life: int) -> WorkerDied:
        """Run one worker from its start to its death."""
        server, address = self._server, self._address
        place = f"{env_name(server.env.id)}.w{number}"
        log_path = Path(server.log_dir) / f"{place}.log"
        with new_page() as (board, fd):
            is_patient = life > 0 or self._is_any_up
            spec = WorkerSpec(
                number, place, life, address, fd, server, self._source, is_patient=is_patient
            )
            name = WorkerName(spec.name)
            self._places[number].workers.append(name)
            async with start_part(place, WORKER, spec, log=log_path, pass_fds=[fd]) as part:
                self._running[name] = part, board
                try:
                    await part.listen(
                        on_stats=lambda stats: None, on_message=lambda body: None
                    )
                except PartDied as error:
                    if not (part.was_ready or error.was_killed):
                        raise NeverReady(str(error)) from None
                    log.warning("%s", error)
                    how, by_sigkill = describe_exit(error.code), error.code == -signal.SIGKILL
                    if await self._was_edited():
                        how += EDITED
                    return WorkerDied(name, how, by_sigkill, _running_code(board))
                finally:
                    del self._running[name]
        return WorkerDied(name, DRAINED)


EDITED = " (the file of its environment was edited: all workers keep the code of the start)"
DRAINED = "ended"
"""How a worker died that had finished. It sent Drained to the router behind all its other messages."""


def _running_code(board: RunningCodePage) -> RunningCode | None:
    shown = board.read()
    return RunningCode(shown.owner, shown.held_s, shown.where) if shown else None


def _is_stopped(pid: int) -> bool:
    """Return whether a process was stopped from outside (SIGSTOP, a debugger). Linux only."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    return False
