"""A child process and the pipe to it. The child ends when its parent does, however that dies."""

import asyncio
import ctypes
import importlib
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from pathlib import Path

from ...wire.pipe import AsyncPipe

COMPUTE_NICENESS = 10
GRACE_S = 5.0
"""How long a child may take to end by itself once its pipe is closed."""


def signal_name(code: int) -> str:
    """The signal that ended a process with this negative exit code; not every one has a name."""
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


class Child:
    """A running child. Reading None from `pipe` means that it has closed its end."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, pipe: AsyncPipe) -> None:
        self.name = name
        self.pipe = pipe
        self._process = process
        self._is_gone = False

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.returncode is not None

    async def begin_with(self, frame: bytes) -> None:
        """The first thing it is told. One that has died already says so by its end, like any other."""
        with suppress(ConnectionError):
            await self.pipe.send(frame)

    async def wait(self) -> int:
        """The exit code, negative for a signal, once it has ended."""
        return await self._process.wait()

    def kill(self) -> None:
        """The child and whatever it started: it leads a process group of its own."""
        if self._is_gone:
            return  # its number may be another's by now
        self._is_gone = self.has_ended
        with suppress(ProcessLookupError):
            self._process.kill()
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    async def end(self, grace_s: float) -> None:
        """Close the pipe, wait, then insist."""
        await self.pipe.close()
        try:
            async with asyncio.timeout(grace_s):
                await self.wait()
        except TimeoutError:
            pass
        finally:
            self.kill()
            await self.wait()


@asynccontextmanager
async def start(
    name: str, entry: str, *, log: Path | None = None, grace_s: float = GRACE_S, computes: bool = False,
    pass_fds: Sequence[int] = (),
) -> AsyncIterator[Child]:  # fmt: skip
    """Start `entry` ("module:function", called with name and socket) in a process of its own.

    Its output goes to `log`, or where ours goes. One that `computes` leaves the CPU to event loops
    that want it for a moment.
    """
    ours, theirs = socket.socketpair()
    with theirs, log.open("ab") if log else nullcontext() as output:
        # the pipe comes first: nothing may be awaited between the process and its `try`
        pipe = await AsyncPipe.open(ours)
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "rollway.loop.processes.child",
                name, entry, str(theirs.fileno()), str(os.getpid()), str(COMPUTE_NICENESS * computes),
                stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output,
                pass_fds=[theirs.fileno(), *pass_fds],
            )  # fmt: skip
        except (OSError, asyncio.CancelledError):
            await pipe.close()
            raise
    child = Child(name, process, pipe)
    try:
        yield child
    finally:
        await child.end(grace_s)


def log_to(path: Path | None, name: str) -> None:
    """What this process has to say, in a file of its own or where its output goes."""
    line = f"%(asctime)s %(levelname)s {name}: %(message)s"
    logging.basicConfig(level=logging.INFO, format=line, filename=path)


def _die_with(parent_pid: int) -> None:
    """Ask the kernel to kill this process when its parent ends, even while it computes."""
    if sys.platform == "linux":
        set_death_signal = 1
        ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit(1)


def main() -> None:
    """The child's first lines: what `start` runs."""
    name, entry, fd, parent_pid, niceness = sys.argv[1:]
    _die_with(int(parent_pid))
    os.setpgid(0, 0)  # Ctrl-C is for the process that decides what to do about it
    os.nice(int(niceness))
    log_to(None, name)
    module, _, function = entry.partition(":")
    target: Callable[[str, socket.socket], None] = getattr(importlib.import_module(module), function)
    target(name, socket.socket(fileno=int(fd)))


if __name__ == "__main__":
    main()
