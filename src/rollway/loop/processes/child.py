"""A child process and the pipe to it. The child ends when its parent ends, however the parent dies."""

import asyncio
import ctypes
import gc
import logging
import os
import pkgutil
import resource
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from pathlib import Path
from typing import NoReturn, TypeVar

import msgspec

from ...records.text import visible
from ...wire.pipe import AsyncPipe, BlockingPipe
from ..lanes.threads import thread_to_the_end
from .leftovers import MARK, end_marked, new_mark

S = TypeVar("S")

log = logging.getLogger(__name__)

COMPUTE_NICENESS = 10
COMPUTE_ENV = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
"""Makes glibc keep freed memory. A training step frees its activations, and the next step needs as much
again: to get fresh pages from the kernel costs more than to compute with them."""
STDERR = 2
OWNER_ONLY = 0o077
"""The umask of all processes: prompts, answers and weights are for this user alone."""
GRACE_S = 5.0
"""How long a child may take to end after its pipe is closed, before it is killed."""


def signal_name(code: int) -> str:
    """Return the name of the signal that ended a process with this negative exit code."""
    try:
        return signal.Signals(-code).name
    except ValueError:  # not every signal has a name
        return f"signal {-code}"


def count_oom_kills() -> int:
    """Return how many processes of this machine the kernel has killed because memory ran out."""
    with suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


class Child:
    """A running child process. Reading None from `pipe` means that the child has ended, or has closed
    its end."""

    def __init__(
        self,
        name: str,
        process: asyncio.subprocess.Process,
        pipe: AsyncPipe,
        mark: str,
        log: Path | None = None,
    ) -> None:
        self.name = name
        self.pipe = pipe
        self.log = log
        self._mark = mark
        self._oom_kills = count_oom_kills()
        self._process = process
        self._is_gone = False
        self.reports_itself = False
        """It sends figures of its own, so that its parent need not measure it."""

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.returncode is not None

    @property
    def was_out_of_memory(self) -> bool:
        """Whether the kernel has killed processes for memory since this child started, and it was one
        of those killed."""
        was_killed = self._process.returncode == -signal.SIGKILL
        return was_killed and count_oom_kills() > self._oom_kills

    async def send_spec(self, spec: object) -> None:
        """Send what `receive_spec` returns. If the child has died already, only its end shows that."""
        with suppress(ConnectionError):
            await self.pipe.send(msgspec.msgpack.encode(spec))

    async def wait(self) -> int:
        """Wait until the child has ended; return its exit code, which is negative for a signal."""
        return await self._process.wait()

    def terminate(self) -> None:
        """Ask the child to end, for a program that does not watch its pipe."""
        with suppress(ProcessLookupError):
            self._process.terminate()

    def kill(self) -> None:
        """Kill the child and everything it started: the child leads its own process group."""
        if self._is_gone:
            return  # another process may have its pid by now
        self._is_gone = self.has_ended
        with suppress(ProcessLookupError):
            self._process.kill()
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    async def end(self, grace_s: float) -> None:
        """Close the pipe, wait up to `grace_s` for the child to end, then kill it."""
        await self.pipe.close()
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await self.wait()
        finally:
            self.kill()
            await self.wait()

    async def clear_up(self) -> None:
        """Wait for the child's end, then end everything that it started. These processes may hold the
        pipe open, so the end of the pipe does not show that the child has ended."""
        await self.wait()
        self.kill()
        try:
            if count := await thread_to_the_end(end_marked, self._mark):
                log.info("%s left %d processes in the background: killed", self.name, count)
        except OSError as error:  # of this process, which may have no descriptors left
            log.warning(
                "what %s left in the background was not looked for: %s", self.name, error
            )
        finally:
            self.pipe.abort()


RUNNING: set[Child] = set()
"""The children of this process."""


@asynccontextmanager
async def start(
    name: str, entry: str, *, log: Path | None = None, grace_s: float = GRACE_S, computes: bool = False,
    pass_fds: Sequence[int] = (),
) -> AsyncIterator[Child]:  # fmt: skip
    """Start `entry` ("module:function", called with name and socket) in a new process. Its output goes
    to `log`, or where this process's output goes. A child that `computes` gets a lower priority, so that
    event loops get the CPU when they need it, and keeps the memory that it frees."""
    niceness, mark = COMPUTE_NICENESS if computes else 0, new_mark()
    parent_end, child_end = socket.socketpair()
    with child_end, log.open("ab") if log else nullcontext() as output:
        # the pipe comes first: nothing may be awaited between the start of the process and its `try`
        pipe = await AsyncPipe.open(parent_end)
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "rollway.loop.processes.child",
                name, entry, str(child_end.fileno()), str(os.getpid()), str(niceness),
                stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output,
                pass_fds=[child_end.fileno(), *pass_fds],
                env={**(COMPUTE_ENV if computes else {}), **os.environ, MARK: mark},
            )  # fmt: skip
        except (OSError, asyncio.CancelledError):
            await pipe.close()
            raise
    child = Child(name, process, pipe, mark, log)
    RUNNING.add(child)
    clearing = asyncio.create_task(child.clear_up())
    try:
        yield child
    finally:
        try:
            await child.end(grace_s)
            await asyncio.shield(clearing)
        finally:
            RUNNING.discard(child)


def receive_spec(sock: socket.socket, kind: type[S]) -> tuple[BlockingPipe, S]:
    """Return the pipe to the parent and the spec that it sends first. Exit if the parent is gone."""
    pipe = BlockingPipe(sock)
    frame = pipe.receive()
    if frame is None:
        sys.exit(0)
    return pipe, msgspec.msgpack.decode(frame, type=kind)


class VisibleFormatter(logging.Formatter):
    """Writes one line for each record, and further lines of its text indented: no id, prompt or error
    can look like a line of the log, or act on the terminal of its reader."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record)).replace("\n", "\n    ")


def log_to(path: Path | None, name: str) -> None:
    """Write this process's log lines to `path`, or where its output goes."""
    handler = logging.FileHandler(path) if path else logging.StreamHandler()
    handler.setFormatter(VisibleFormatter(f"%(asctime)s %(levelname)s {name}: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def _die_with(parent_pid: int) -> None:
    """Ask the kernel to kill this process when its parent ends, even while it computes."""
    if sys.platform == "linux":
        set_death_signal = 1
        ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit(1)


def end_at_once(code: int = 0) -> NoReturn:
    """End this process without waiting for coroutines and threads that refuse to end."""
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)


def raise_file_limit() -> None:
    """Let this process, and those that it starts, open as many files as the machine allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):  # macOS refuses some values
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _keep_descriptors() -> None:
    """Keep the pipe and all other descriptors of this process from the programs that it will start."""
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):  # the one that the listing itself used
            if int(name) > STDERR:
                os.set_inheritable(int(name), False)


def main() -> None:
    """Run the entry that `start` named; this is the first thing a child does."""
    name, entry, fd, parent_pid, niceness = sys.argv[1:]
    _die_with(int(parent_pid))
    _keep_descriptors()
    os.umask(OWNER_ONLY)
    raise_file_limit()
    os.setpgid(0, 0)  # Ctrl-C goes to the parent alone, which decides what to do
    os.nice(int(niceness))
    log_to(None, name)
    _find(entry)(name, socket.socket(fileno=int(fd)))


def _find(entry: str) -> Callable[[str, socket.socket], None]:
    """Import the entry. What is imported stays, so the collector need not look for garbage meanwhile:
    with the libraries of a model that takes a sixth of the time."""
    gc.disable()
    try:
        found: Callable[[str, socket.socket], None] = pkgutil.resolve_name(entry)
        return found
    finally:
        gc.freeze()
        gc.enable()


if __name__ == "__main__":
    main()
