"""Children end with their parent, however it ends."""

import os
import signal
import socket
import subprocess
import sys

import psutil
import pytest

from rollway.loop.lanes.lanes import thread
from rollway.loop.processes import child

PARENT = """
import asyncio, sys
from rollway.loop.processes import child
async def main():
    async with child.start("grandchild", "tests.loop.test_child:busy", grace_s=0) as one:
        await one.pipe.receive()
        print(one.pid, flush=True)
        await asyncio.sleep(60)
asyncio.run(main())
"""


def busy(name: str, sock: socket.socket) -> None:
    """A child that never looks at its pipe."""
    sock.sendall((5).to_bytes(8, "little") + b"ready")
    while True:
        pass


def polite(name: str, sock: socket.socket) -> None:
    while sock.recv(1024):
        pass


def test_a_killed_parent_takes_a_busy_child_along() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    grandchild = psutil.Process(int(parent.stdout.readline()))
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    psutil.wait_procs([grandchild], timeout=10)
    assert not grandchild.is_running()


@pytest.mark.anyio
async def test_leaving_the_block_ends_the_child() -> None:
    async with child.start("polite", "tests.loop.test_child:polite") as one:
        process = psutil.Process(one.pid)
        assert process.is_running()
    assert await one.wait() == 0


@pytest.mark.anyio
async def test_a_child_that_will_not_end_is_killed() -> None:
    async with child.start("busy", "tests.loop.test_child:busy", grace_s=0.1) as one:
        assert await one.pipe.receive() == b"ready"
    assert await one.wait() == -signal.SIGKILL


@pytest.mark.anyio
async def test_open_files_do_not_grow() -> None:
    me = psutil.Process()
    await thread(lambda: None)
    async with child.start("warm", "tests.loop.test_child:polite"):
        pass
    before = me.num_fds()
    for _ in range(3):
        async with child.start("polite", "tests.loop.test_child:polite"):
            pass
    assert me.num_fds() <= before
