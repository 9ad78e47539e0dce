"""The workers' door: private, short enough, and gone when its server is, however that ended."""

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
with private_address("door") as address, zmq.Context() as context, context.socket(zmq.ROUTER) as wire:
    wire.bind(address)
    print(address, flush=True)
    sys.stdin.read()
"""


def hold(temporary: Path) -> "subprocess.Popen[str]":
    """A process that keeps a door open until it is told to end."""
    return subprocess.Popen(
        [sys.executable, "-c", HOLD], env={**os.environ, "TMPDIR": str(temporary)}, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip


def path_of(process: "subprocess.Popen[str]") -> Path:
    assert process.stdout is not None
    return Path(process.stdout.readline().strip().removeprefix("ipc://"))


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A short path: a unix socket's own has no room for pytest's."""
    with TemporaryDirectory(prefix="door-") as folder:
        yield Path(folder)


def test_it_is_for_this_user_only(temporary: Path) -> None:
    with hold(temporary) as holder:
        folder = path_of(holder).parent
        assert folder.parent == temporary
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        holder.communicate("")
    assert not folder.exists()


def test_what_the_killed_left_is_removed_and_the_living_are_left_alone(temporary: Path) -> None:
    with hold(temporary) as dead, hold(temporary) as new, hold(temporary) as living:
        paths = [path_of(one) for one in (dead, new, living)]
        for killed in (dead, new):
            os.kill(killed.pid, signal.SIGKILL)
            killed.wait()
        for path in (paths[0], paths[2]):
            os.utime(path.parent, (0, 0))  # as if it had been there for long
        with hold(temporary) as next_one:
            path_of(next_one)
            assert [path.parent.exists() for path in paths] == [False, True, True]
            next_one.communicate("")
        living.communicate("")
    assert not paths[2].parent.exists()
