"""Children end with their parent, however the parent ends."""

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
    async with child.start("grandchild", "tests.loop.test_child:busy", grace_s=0) as process:
        await process.pipe.receive()
        print(process.pid, flush=True)
        await asyncio.sleep(60)
asyncio.run(main())
"""


def busy(name: str, sock: socket.socket) -> None:
    """A child that never looks at its pipe."""
    sock.sendall((5).to_bytes(8, "little") + b"ready")
    while True:
        pass


def waits_for_end(name: str, sock: socket.socket) -> None:
    while sock.recv(1024):
        pass


def test_killing_a_parent_also_ends_its_busy_child() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    grandchild = psutil.Process(int(parent.stdout.readline()))
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    psutil.wait_procs([grandchild], timeout=60)
    assert not grandchild.is_running()


@pytest.mark.anyio
async def test_leaving_the_block_ends_the_child() -> None:
    async with child.start("waits", "tests.loop.test_child:waits_for_end") as process:
        assert psutil.Process(process.pid).is_running()
    assert await process.wait() == 0


@pytest.mark.anyio
async def test_a_child_that_will_not_end_is_killed() -> None:
    async with child.start("busy", "tests.loop.test_child:busy", grace_s=0.1) as process:
        assert await process.pipe.receive() == b"ready"
    assert await process.wait() == -signal.SIGKILL


@pytest.mark.anyio
async def test_children_that_ended_leave_no_open_files() -> None:
    me = psutil.Process()
    await thread(lambda: None)
    async with child.start("warm", "tests.loop.test_child:waits_for_end"):
        pass
    before = me.num_fds()
    for _ in range(3):
        async with child.start("waits", "tests.loop.test_child:waits_for_end"):
            pass
    assert me.num_fds() <= before
