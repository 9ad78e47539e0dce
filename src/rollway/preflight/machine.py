"""Checks this machine before a run starts: ports, folders, disk space, keys in the environment."""

import os
import resource
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from ..config.address import IPC
from ..config.sections import EngineConfig, RunConfig
from ..errors import ConfigError, PortError, RunDirError
from ..inference.http.endpoint import find_proxy
from ..loop.processes.port import bind_port

LOOPBACK = "127.0.0.1"
CONNECT_S = 5.0
OTHER_FILES = 256
"""Files of a worker besides its connections: libraries, lanes, segments, sockets of the environment."""
LEAST_PAYLOAD_BYTES = 64 << 20
"""Room for the first rollouts, logs and metrics."""
VERSIONS, STATE_SIZES = 2, 6
"""A trainer writes the next version before the last one is removed. Its state, in float32 with two
averages of each weight, is up to this many times as large as weights in bfloat16."""


def check_ports(config: RunConfig) -> None:
    """Refuse a port that the run file names and that something else uses."""
    taken: dict[int, str] = {}
    for key, host, port in _ports(config):
        if other := taken.get(port):
            raise PortError(
                f"'{key}' and '{other}' are both {port}: choose another port for one"
            )
        taken[port] = key
        bind_port(key, host, port).close()


def _ports(config: RunConfig) -> Iterator[tuple[str, str, int]]:
    engine, prometheus, zmq = config.engine, config.metrics.prometheus, config.transport.zmq
    if engine.embedded and engine.embedded.port:
        yield "engine.embedded.port", LOOPBACK, engine.embedded.port
    if engine.vllm and engine.vllm.port:
        for replica in range(engine.vllm.replicas):
            yield "engine.vllm.port", LOOPBACK, engine.vllm.port + replica
    if prometheus:
        yield "metrics.prometheus.port", prometheus.host, prometheus.port
    if zmq:
        yield from tcp_port("transport.zmq.bind", zmq.bind)


def tcp_port(key: str, address: str | None) -> Iterator[tuple[str, str, int]]:
    """Yield the port of `tcp://host:port`, unless it is `*`, which takes any."""
    if address is None or address.startswith(IPC):
        return
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if port != "*":
        yield key, host.strip("[]").replace("*", "0.0.0.0"), int(port)


def check_bind_port(key: str, address: str) -> None:
    for named, host, port in tcp_port(key, address):
        bind_port(named, host, port).close()


def check_room_on_disk(folder: Path, weights_bytes: int, *, trains: bool) -> None:
    """Refuse a folder that cannot be written to, or whose disk is too full for the first step."""
    parent = check_writable(folder)
    needed, free = LEAST_PAYLOAD_BYTES, shutil.disk_usage(parent).free
    if trains:
        needed += (VERSIONS + STATE_SIZES) * weights_bytes
    if free < needed:
        parts = "weights, the trainer's state and payload" if trains else "payload"
        raise RunDirError(
            f"the disk of {parent} has {free >> 20} MB free, and the run needs at least "
            f"{needed >> 20} MB for {parts}: make room, or set 'output_dir' to another disk"
        )


def check_open_files(key: str, concurrency: int) -> None:
    """Refuse more rollouts in one worker than it may have connections."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    needed = concurrency + OTHER_FILES
    if most != resource.RLIM_INFINITY and needed > most:
        raise ConfigError(
            f"'{key}' = {concurrency} needs up to {needed} open files in each worker, and this machine "
            f"allows {most} (ulimit -Hn): use more workers that run fewer rollouts, or raise the limit"
        )


def check_writable(folder: Path) -> Path:
    """Return the part of a path that exists, or refuse a path below which nothing can be written."""
    parent = folder.absolute()
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir():
        raise RunDirError(
            f"{folder} cannot be created: {parent} is a file; choose another folder"
        )
    if not os.access(parent, os.W_OK | os.X_OK):
        raise RunDirError(
            f"{folder} cannot be written: {parent} is read-only for this user; change its permissions, "
            "or choose another folder ('output_dir', --output)"
        )
    return parent


def check_engine_key(engine: EngineConfig, option: str = "engine.external.key_var") -> None:
    """Refuse an engine whose key is said to be in an environment variable that is not set."""
    name = engine.external.key_var if engine.external else None
    if name and not os.environ.get(name):
        raise ConfigError(
            f"'{option}' = '{name}', but the environment variable {name} is not set: export it before "
            "you start rollway"
        )


def check_engines(urls: tuple[str, ...]) -> None:
    """Refuse an address at which nothing listens. Of one behind a proxy that cannot be seen."""
    for url in urls:
        if find_proxy(url):
            continue
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        try:
            socket.create_connection((parts.hostname, port), CONNECT_S).close()
        except OSError as error:
            raise ConfigError(
                f"nothing listens at {url} ({error.strerror or error}): start the engine, or correct "
                "the address ('engine.external.url', --engine-url)"
            ) from None


def check_urls(urls: tuple[str, ...], option: str) -> None:
    """Refuse an address that no HTTP client could use."""
    for url in urls:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                f"{option} = '{url}': expected http://HOST:PORT, such as http://localhost:8000"
            )
