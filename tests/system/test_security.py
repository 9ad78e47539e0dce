"""Nobody but the user who started a run can talk to it or read its files."""

import http.client
import json
import os
import re
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import zmq
from tests.doubles.stand_ins import DrawingEngine
from tests.doubles.workspace import DEADLINE_S, ENVS, MARK, Workspace, marked_processes

from rollway.records.ids import PolicyVersion, RolloutId
from rollway.records.task import Task
from rollway.records.turn import Sampling
from rollway.wire.keys import ClientKeys, make_keys, read_client_keys
from rollway.wire.messages import Hello, NewPolicy, Run, encode

root_only = pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
pytestmark = [pytest.mark.system, root_only]

NOBODY = 65534
CONTROLS = (
    "/update_weight_version", "/collective_rpc", "/pause", "/resume", "/reset_prefix_cache",
    "/v1/completions",
)  # fmt: skip
FACTS = ("/v1/models", "/metrics", "/weight_info", "/server_info", "/model_info", "/version")


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


def get(port: int, path: str) -> str:
    """Return the status and the body of a reply."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", path)
    reply = connection.getresponse()
    return f"{reply.status} {reply.read().decode()}"


def connect_to(path: str) -> str:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(path)
    return "connected"


def send_messages(address: str, keys: ClientKeys | None) -> str:
    """Say hello to an env server, name a version, and ask for a rollout of one's own."""
    task = Task(id="0", prompt="0?", answer="1")
    run = Run(RolloutId("r"), 1, task, Sampling(8), PolicyVersion(0), 0)
    with zmq.Context() as context, context.socket(zmq.DEALER) as wire:
        wire.setsockopt(zmq.LINGER, 0)
        if keys:
            keys.secure(wire)
        wire.connect(address)
        for message in (Hello("client"), NewPolicy(PolicyVersion(99)), run):
            wire.send(encode(message))
        return "answered" if wire.poll(1000) else "no answer"


def listening(processes: Iterable[psutil.Process]) -> tuple[dict[int, str], set[str]]:
    """Return the ports of processes with the one that has them, and their unix sockets with names."""
    ports, paths = {}, set[str]()
    for process in processes:
        for found in process.net_connections("inet"):
            if found.status == psutil.CONN_LISTEN:
                ports[found.laddr.port] = " ".join(process.cmdline())
        unix = process.net_connections("unix")
        paths |= {str(found.laddr) for found in unix if found.laddr}
    return ports, paths


def assert_private(paths: set[str]) -> None:
    """No other user can connect to these unix sockets, or enter the folders that they are in. A socket
    with an abstract name would be in no folder."""
    for path in paths:
        assert path.startswith("/"), path
        assert as_nobody(lambda path=path: connect_to(path)) == "PermissionError"
        assert stat.S_IMODE(Path(path).parent.stat().st_mode) == 0o700


def assert_owner_only(folder: Path) -> None:
    """No other user can read a file of this folder."""
    files = [path for path in folder.rglob("*") if not path.is_symlink()]
    opened = [path for path in files if path.stat().st_mode & 0o077]
    assert files
    assert not opened


def assert_figures_only(metrics: str) -> None:
    """Each line has a number, and labels of one word. Prompts of these tasks have a question mark."""
    lines = [line for line in metrics.splitlines() if not line.startswith("#")]
    pattern = re.compile(
        r"rollway_\w+(\{(\w+=\"[^\s?]+\",?)+\})? ([\d.e+-]+|nan|[+-]?inf)", re.I
    )
    assert lines
    assert not [line for line in lines if not pattern.fullmatch(line)]


def test_every_socket_and_file_of_a_run_is_guarded(work: Workspace) -> None:
    """The engine has a port with a key, Prometheus one that tells figures, and the rest are unix sockets
    in private folders."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        scrape = free.getsockname()[1]
    options = ("--set", "max_steps=500", "--set", f"metrics.prometheus.port={scrape}",
               "--set", "transport.zmq={}")  # fmt: skip
    with work.training(*options) as process:
        ports, paths = listening(work.processes())
        (engine,) = [port for port, owner in ports.items() if "embedded.front" in owner]
        assert set(ports) == {engine, scrape}, "these are all ports"
        for path in CONTROLS:
            assert as_nobody(lambda path=path: post(engine, path)) == "401"
        for path in FACTS:
            assert as_nobody(lambda path=path: get(engine, path))[:3] == "401"
        assert as_nobody(lambda: post(engine, "/health")) in ("200", "405")
        status, _, metrics = as_nobody(lambda: get(scrape, "/metrics")).partition(" ")
        assert status == "200"
        assert_figures_only(metrics)
        assert len(paths) == 3, "clients, workers, and the trainer"
        assert_private(paths)
        assert_owner_only(work.run)
        before = work.metrics()[-1]["step"]
        work.wait_for_step(process, before + 2)
        log = (work.run / "logs" / "engine.log").read_text()
        assert "refused request 1: its key is missing or wrong" in log
    assert all(line["off_policy/max"] <= 1 for line in work.metrics())


@contextmanager
def started(folder: Path, *args: str) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-m", "rollway", *args]
    with subprocess.Popen(
        command, cwd=folder, env={**os.environ, MARK: str(folder)}, text=True, stdout=subprocess.PIPE
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            process.terminate()
            process.wait(DEADLINE_S)


def options(engine: DrawingEngine, kind: str) -> tuple[str, ...]:
    return (
        "--engine-url", engine.url, "--renderer", "qwen3", "--workers", "1",
        "--template", '{"enable_thinking": false}', "--args", json.dumps({"kind": kind}),
    )  # fmt: skip


def test_an_evaluation_listens_at_private_sockets_only(
    tmp_path: Path, tiny_moe: Path, engine: DrawingEngine
) -> None:
    words = ("eval", str(ENVS), "-m", "m", "-n", "100000", "--max-tokens", "8", "--tokens",
             "--tokenizer", str(tiny_moe))  # fmt: skip
    with started(tmp_path, *words, *options(engine, "Counting")) as process:
        while not engine.num_drawn:
            assert process.poll() is None
            time.sleep(0.05)
        ports, paths = listening(marked_processes(str(tmp_path)))
        assert not ports
        assert len(paths) == 2, "clients, and workers"
        assert_private(paths)
        assert_owner_only(tmp_path / "outputs")


def test_a_served_environment_listens_at_private_sockets_or_demands_keys(
    tmp_path: Path, tiny_moe: Path, engine: DrawingEngine
) -> None:
    words = (
        "serve",
        str(ENVS),
        "--model",
        str(tiny_moe),
        *options(engine, "Counting"),
    )
    with started(tmp_path, *words) as process:
        assert process.stdout is not None
        next(line for line in process.stdout if "Serving" in line)
        ports, paths = listening(marked_processes(str(tmp_path)))
        assert not ports
        assert_private(paths)
        assert_owner_only(tmp_path / "outputs")
    server, _ = make_keys(tmp_path / "keys")
    _, other = make_keys(tmp_path / "other")
    unknown = read_client_keys(other)
    with started(
        tmp_path, *words, "--bind", "tcp://127.0.0.1:*", "--keys", str(server)
    ) as process:
        assert process.stdout is not None
        line = next(line for line in process.stdout if "Serving" in line)
        found = re.search(r"at (tcp://127.0.0.1:(\d+)) ", line)
        assert found
        ports, paths = listening(marked_processes(str(tmp_path)))
        assert set(ports) == {int(found[2])}
        assert_private(paths)
        for keys in (None, unknown):
            told = as_nobody(lambda keys=keys: send_messages(found[1], keys))
            assert told == "no answer"
        log = tmp_path / "outputs" / "serve" / "envs" / "logs" / "envs.router.log"
        assert "refused connection 2" in log.read_text()
    assert not engine.num_drawn, "no rollout of a stranger ran"
