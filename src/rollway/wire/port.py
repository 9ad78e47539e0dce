"""A socket that others connect to: bounded in what it takes from each, and guarded where it has keys."""

import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import zmq
from msgspec import Struct

from ..errors import PortError
from .gate import REFUSALS, Gate, count_refused
from .keys import server_keys


class BoundPort(Struct, frozen=True):
    """A bound socket, and what has to run as long as it is open."""

    wire: Any
    address: str
    guards: tuple[Callable[[], Coroutine[Any, Any, None]], ...] = ()


def open_router(context: Any, stack: ExitStack) -> Any:
    """A ROUTER that says when a peer is gone, and ends without waiting for anybody."""
    wire = stack.enter_context(context.socket(zmq.ROUTER))
    wire.setsockopt(zmq.ROUTER_MANDATORY, 1)
    wire.setsockopt(zmq.LINGER, 0)
    return wire


def open_port(
    context: Any, stack: ExitStack, bind: str, keys: str | None, *, max_bytes: int, max_unread: int,
    max_unsent: int,
) -> BoundPort:  # fmt: skip
    """Bind a ROUTER. A message of one peer has at most `max_bytes`; so many of its messages may lie here
    unread, and so many for it unsent (0 for no bound). With keys only those who hold an accepted one get
    a word in."""
    wire = open_router(context, stack)
    wire.setsockopt(zmq.MAXMSGSIZE, max_bytes)
    wire.setsockopt(zmq.RCVHWM, max_unread)
    wire.setsockopt(zmq.SNDHWM, max_unsent)
    wire.setsockopt(zmq.IPV6, "[" in bind)
    guards: tuple[Callable[[], Coroutine[Any, Any, None]], ...] = ()
    if keys:
        ours = server_keys(Path(keys))
        gate = stack.enter_context(Gate(context, ours))
        ours.secure(wire)
        monitor = stack.enter_context(wire.get_monitor_socket(REFUSALS))
        stack.callback(wire.disable_monitor)
        guards = (gate.serve, lambda: count_refused(monitor))
    try:
        wire.bind(bind)
    except zmq.ZMQError as error:
        why = os.strerror(error.errno or 0)
        raise PortError(f"{bind} cannot be bound: {why}; choose another address") from None
    return BoundPort(wire, wire.getsockopt(zmq.LAST_ENDPOINT).decode(), guards)


PREFIX = "rollway-ipc-"
SHORT = "/tmp"
"""For where the temporary folder's own path leaves no room: a unix socket's has about 100 bytes."""
NEW_S = 10.0


@contextmanager
def private_address(name: str) -> Iterator[str]:
    """A unix socket in a new folder that nobody else may enter; both are removed at the end, and so are
    those that killed processes left behind."""
    longest = Path(tempfile.gettempdir()) / f"{PREFIX}{8 * 'x'}" / name
    parent = SHORT if len(os.fsencode(longest)) > zmq.IPC_PATH_MAX_LEN else str(longest.parent.parent)
    for path in Path(parent).glob(f"{PREFIX}*/{name}"):
        if _is_left_behind(path):
            shutil.rmtree(path.parent, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir=parent, ignore_cleanup_errors=True) as folder:
        yield f"ipc://{folder}/{name}"


def _is_left_behind(path: Path) -> bool:
    """Whether it is a socket of this user's that nobody listens at any more. A new one is left alone: a
    socket has a name for a moment before it is listened at."""
    try:
        folder = path.parent.stat()
        is_new = time.time() - folder.st_mtime < NEW_S
        if folder.st_uid != os.getuid() or is_new or not path.is_socket():
            return False
        with socket.socket(socket.AF_UNIX) as probe:
            probe.setblocking(False)
            probe.connect(str(path))
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False
