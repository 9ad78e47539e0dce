"""Finds and ends background processes that a child left behind.

Every child has a mark in its environment, and everything that it starts inherits the mark: also a daemon
that has left its parent and its session. A process with an emptied environment is not found.
"""

import hashlib
import itertools
import os
import re
import signal
from contextlib import suppress
from pathlib import Path

MARK = "ROLLWAY_PROCESS"
FOLDER = "in:"
"""How the part of a mark begins that names a run's directory or an evaluation's."""
MAX_PASSES = 10
"""A process that forks while it is searched for is found by the next pass."""
_numbers = itertools.count(1)


def new_mark() -> str:
    """Return a mark for a child. It begins with the mark of this process, which may be a child too."""
    return f"{os.environ.get(MARK, '')}/{os.getpid()}.{next(_numbers)}"


def mark_folder(folder: Path) -> None:
    """Let all processes that this one starts from now on have a mark that names this folder. Processes
    that were left in the folder before are killed: the command that started them cannot do that any more
    if it was killed itself. The caller has locked the folder."""
    part = FOLDER + hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:16]
    _kill_all(re.compile(rf"{MARK}=\S*{part}(/|$)".encode()))
    os.environ[MARK] = f"{os.environ.get(MARK, '')}/{part}"


def end_marked(mark: str) -> int:
    """Kill all processes with this mark or one that begins with it. Return how many. Blocks: it reads a
    file of /proc for each process of this user. Without /proc nothing is done."""
    return _kill_all(re.compile(re.escape(f"{MARK}={mark}").encode() + b"(/|$)"))


def _kill_all(wanted: "re.Pattern[bytes]") -> int:
    """Kill all processes with such a mark, but neither this one nor those that it was started from: a
    command that is typed in a shell which a killed run left has the mark of that run's folder."""
    num_killed, spared = 0, _with_ancestors(os.getpid())
    for _ in range(MAX_PASSES):
        found = _kill_marked(wanted, spared)
        num_killed += found
        if not found:
            break
    return num_killed


def _with_ancestors(pid: int) -> set[int]:
    pids: set[int] = set()
    with suppress(FileNotFoundError):
        while pid:
            pids.add(pid)
            stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
            pid = int(stat.rpartition(")")[2].split()[1])
    return pids


def _kill_marked(wanted: "re.Pattern[bytes]", spared: set[int]) -> int:
    num_killed = 0
    with suppress(FileNotFoundError), os.scandir("/proc") as entries:
        for entry in entries:
            if entry.name.isdigit() and int(entry.name) not in spared:
                # another user's process, or one that has just ended
                with suppress(PermissionError, FileNotFoundError, ProcessLookupError):
                    num_killed += _kill_if_marked(int(entry.name), wanted)
    return num_killed


def _kill_if_marked(pid: int, wanted: "re.Pattern[bytes]") -> bool:
    descriptor = os.pidfd_open(pid)  # from here on this pid means no other process
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            variables = file.read().split(b"\0")
        is_marked = any(wanted.match(variable) for variable in variables)
        if is_marked:
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        return is_marked
    finally:
        os.close(descriptor)
