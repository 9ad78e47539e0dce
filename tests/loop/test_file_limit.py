"""Commands and their processes may open as many files as the machine allows."""

import asyncio
import resource
import socket
import subprocess
import sys

import pytest

from rollway.errors import ConfigError
from rollway.loop.processes import child
from rollway.preflight.machine import check_open_files

SOFT, HARD = 128, 512
COMMAND = """
from rollway.cli.main import main
try:
    main(["--help"])
except SystemExit:
    pass
"""


def report_limit(name: str, sock: socket.socket) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{soft} {hard}".encode()
    sock.sendall(len(text).to_bytes(8, "little") + text)


def ask_child() -> None:
    async def ask() -> bytes | None:
        async with child.start("child", f"{__name__}:report_limit") as process:
            return await process.pipe.receive()

    reported = asyncio.run(ask())
    assert reported == f"{HARD} {HARD}".encode(), reported


def run_limited(code: str) -> None:
    """Run code in a process that starts with a low limit which it may raise."""

    def lower() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (SOFT, HARD))

    done = subprocess.run(
        [sys.executable, "-c", code], preexec_fn=lower, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_a_command_raises_the_limit() -> None:
    limit = "import resource; found = resource.getrlimit(resource.RLIMIT_NOFILE)"
    run_limited(f"{COMMAND}\n{limit}\nassert found == ({HARD}, {HARD}), found")


def test_a_child_raises_the_limit() -> None:
    run_limited("from tests.loop.test_file_limit import ask_child; ask_child()")


def test_rollouts_that_need_more_files_than_the_machine_allows_are_refused() -> None:
    run_limited("from tests.loop.test_file_limit import check_limit; check_limit()")


def check_limit() -> None:
    check_open_files("env.0.server.concurrency", SOFT)
    with pytest.raises(
        ConfigError,
        match=rf"'env.0.server.concurrency' = {HARD} needs up to \d+ open files in each worker, and "
        rf"this machine allows {HARD} \(ulimit -Hn\)",
    ):
        check_open_files("env.0.server.concurrency", HARD)
