"""Children end with their parent, however the parent ends."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from rollway.loop.lanes.threads import thread
from rollway.loop.processes import child
from rollway.loop.processes.part import describe_death

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


def greedy(name: str, sock: socket.socket) -> None:
    """A child that takes memory without end, once it is told to."""
    sock.recv(1024)
    taken = []
    while True:
        taken.append(bytearray(os.urandom(16 << 20)))


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


@contextmanager
def small_memory() -> Iterator[Path]:
    """A control group whose processes may take 64 MB, if this process may make one."""
    root = Path("/sys/fs/cgroup")
    is_old = (root / "memory").is_dir()
    group = (root / "memory" if is_old else root) / f"rollway-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control groups: {error}")
    try:
        limit = group / ("memory.limit_in_bytes" if is_old else "memory.max")
        limit.write_text(str(64 << 20))
        yield group
    except FileNotFoundError as error:
        pytest.skip(f"no control groups: {error}")
    finally:
        group.rmdir()


@pytest.mark.anyio
async def test_a_child_that_dies_for_lack_of_memory_says_so() -> None:
    with small_memory() as group:
        async with child.start("greedy", "tests.loop.test_child:greedy") as process:
            await thread((group / "cgroup.procs").write_text, str(process.pid))
            await process.pipe.send(b"go")
            code = await process.wait()
            told = describe_death(process, code)
        assert told == "was killed by SIGKILL, probably because memory ran out"
    async with child.start("waits", "tests.loop.test_child:waits_for_end") as process:
        process.kill()
        assert describe_death(process, await process.wait()) == "was killed by SIGKILL"
