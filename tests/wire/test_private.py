"""The workers' door: private, short enough, and gone when its server is, however that ended."""

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from rollway.wire.private import private_address

HOLD = """
import sys, zmq
from rollway.wire.private import private_address
with private_address("door") as address, zmq.Context() as context, context.socket(zmq.ROUTER) as wire:
    wire.bind(address)
    print(address, flush=True)
    sys.stdin.read()
"""


def test_it_is_for_this_user_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with private_address("door") as address:
        folder = Path(address.removeprefix("ipc://")).parent
        assert folder.parent == tmp_path
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not folder.exists()


def test_what_the_killed_left_is_removed_and_the_living_are_left_alone() -> None:
    def hold() -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", HOLD]
        return subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    with hold() as dead, hold() as living:
        paths = []
        for process in (dead, living):
            assert process.stdout is not None
            paths.append(Path(process.stdout.readline().strip().removeprefix("ipc://")))
        os.kill(dead.pid, signal.SIGKILL)
        dead.wait()
        assert [path.exists() for path in paths] == [True, True]
        with private_address("door"):
            assert [path.parent.exists() for path in paths] == [False, True]
        living.communicate("")
    assert not paths[1].parent.exists()
