"""Processes of a bench, and what the kernel says of them."""

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

spawn = multiprocessing.get_context("spawn")


class Started:
    """A process started for a bench, and the pipe to it."""

    def __init__(self, target: Callable[..., None], args: tuple[Any, ...]) -> None:
        self.pipe: Connection
        self.pipe, end = spawn.Pipe()
        self._process = spawn.Process(target=target, args=(end, *args), daemon=True)
        self._process.start()
        end.close()  # so that its death is noticed

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def ask(self, question: Any = "take") -> Any:
        self.pipe.send(question)
        return self.pipe.recv()

    def check(self) -> None:
        """Raise if it has died."""
        if not self._process.is_alive():
            raise RuntimeError(f"a process of the bench ended with {self._process.exitcode}")

    def end(self) -> None:
        self._process.kill()
        self._process.join()


@contextmanager
def started(target: Callable[..., None], *args: Any) -> Iterator[Started]:
    """A process of its own that runs `target(pipe, *args)` until the block ends."""
    process = Started(target, args)
    try:
        yield process
    finally:
        process.end()


def children(pid: int) -> list[int]:
    return [
        int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    ]


def cpu_s(pids: Iterable[int]) -> float:
    """CPU seconds of processes so far."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def peak_bytes(pid: int) -> int:
    """The most memory a process has held so far."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def rss_bytes(pid: int) -> int:
    """The memory a process holds now."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))
