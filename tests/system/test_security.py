"""Nobody but the user who started a run can talk to it or read its files."""

import http.client
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from tests.doubles.workspace import Workspace

pytestmark = pytest.mark.system

NOBODY = 65534
CONTROLS = (
    "/update_weight_version", "/collective_rpc", "/pause", "/resume", "/reset_prefix_cache",
    "/v1/completions",
)  # fmt: skip


def as_nobody(attempt: Callable[[], str]) -> str:
    """Return what an attempt of another user of this machine comes to."""
    for codec in ("idna", "latin-1", "iso-8859-1"):
        "".encode(codec)  # the other user may not be able to import it
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        told = ""
        try:
            os.chdir("/")
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            told = attempt()
        except Exception as error:
            told = type(error).__name__
        finally:
            os.write(writer, told.encode())
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as said:
        told = said.read()
    os.waitpid(pid, 0)
    return told


def post(port: int, path: str) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("POST", path, b'{"method": "reload_weights", "new_version": "999"}')
    return str(connection.getresponse().status)


def connect_to(path: str) -> str:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(path)
    return "connected"


def listening(work: Workspace) -> tuple[dict[int, str], set[str]]:
    """Return the ports of a run with the process that has them, and its unix sockets that have names."""
    ports, paths = {}, set[str]()
    for process in work.processes():
        for found in process.net_connections("inet"):
            if found.status == psutil.CONN_LISTEN:
                ports[found.laddr.port] = " ".join(process.cmdline())
        unix = process.net_connections("unix")
        paths |= {str(found.laddr) for found in unix if str(found.laddr).startswith("/")}
    return ports, paths


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
def test_every_socket_and_file_of_a_run_is_guarded(work: Workspace) -> None:
    """The engine has a port with a key, Prometheus one that tells figures, and the rest are unix sockets
    in private folders."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        scrape = free.getsockname()[1]
    options = ("--set", "max_steps=500", "--set", f"metrics.prometheus.port={scrape}",
               "--set", "transport.zmq={}")  # fmt: skip
    with work.training(*options) as process:
        ports, paths = listening(work)
        (engine,) = [port for port, owner in ports.items() if "embedded.front" in owner]
        assert set(ports) == {engine, scrape}, "these are all ports"
        for path in CONTROLS:
            assert as_nobody(lambda path=path: post(engine, path)) == "401"
        assert as_nobody(lambda: post(engine, "/health")) in ("200", "405")
        assert len(paths) == 3, "clients, workers, and the trainer"
        for path in paths:
            assert as_nobody(lambda path=path: connect_to(path)) == "PermissionError"
            assert stat.S_IMODE(Path(path).parent.stat().st_mode) == 0o700
        files = [path for path in work.run.rglob("*") if not path.is_symlink()]
        opened = [path for path in files if path.stat().st_mode & 0o077]
        assert files
        assert not opened
        before = work.metrics()[-1]["step"]
        work.wait_for_step(process, before + 2)
        log = (work.run / "logs" / "engine.log").read_text()
        assert "refused request 1: its key is missing or wrong" in log
    assert all(line["off_policy/max"] <= 1 for line in work.metrics())
