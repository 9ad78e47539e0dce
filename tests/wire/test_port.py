"""The workers' socket is private, has a short path, and is removed however its server ended."""

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

HOLD = """
import sys, zmq
from rollway.wire.port import private_address
with private_address("workers") as address, zmq.Context() as context, context.socket(zmq.ROUTER) as wire:
    wire.bind(address)
    print(address, flush=True)
    sys.stdin.read()
"""


def hold(temporary: Path) -> "subprocess.Popen[str]":
    """Start a process that keeps a private socket open until its input ends."""
    return subprocess.Popen(
        [sys.executable, "-c", HOLD], env={**os.environ, "TMPDIR": str(temporary)}, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip


def path_of(process: "subprocess.Popen[str]") -> Path:
    assert process.stdout is not None
    return Path(process.stdout.readline().strip().removeprefix("ipc://"))


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A short path, because the path of a unix socket has no room for pytest's folder."""
    with TemporaryDirectory(prefix="socket-") as folder:
        yield Path(folder)


def test_the_socket_is_for_this_user_only_and_is_removed(temporary: Path) -> None:
    with hold(temporary) as holder:
        folder = path_of(holder).parent
        assert folder.parent == temporary
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        holder.communicate("")
    assert not folder.exists()


def test_sockets_of_killed_processes_are_removed_and_those_in_use_stay(
    temporary: Path,
) -> None:
    with hold(temporary) as dead, hold(temporary) as new, hold(temporary) as living:
        paths = [path_of(process) for process in (dead, new, living)]
        for killed in (dead, new):
            os.kill(killed.pid, signal.SIGKILL)
            killed.wait()
        for path in (paths[0], paths[2]):
            os.utime(path.parent, (0, 0))  # as if it had been there for a long time
        with hold(temporary) as following:
            path_of(following)
            assert [path.parent.exists() for path in paths] == [False, True, True]
            following.communicate("")
        living.communicate("")
    assert not paths[2].parent.exists()
