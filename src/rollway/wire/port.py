"""Sockets that other processes connect to. Each peer is bounded; keys may be required."""

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
from zmq.asyncio import Context, Socket
from zmq.auth.asyncio import AsyncioAuthenticator

from ..errors import PortError
from .authenticator import REFUSALS, AcceptedKeys, count_refused
from .keys import read_server_keys

IPC = "ipc://"
Guard = Callable[[], Coroutine[Any, Any, None]]


class PortBounds(Struct, frozen=True):
    """Bounds for each peer of a socket; 0 means no bound."""

    max_bytes: int
    """Size of one message from the peer."""
    max_unread: int
    """Messages from the peer that wait to be read."""
    max_unsent: int
    """Messages that wait to be sent to the peer."""


class BoundPort(Struct, frozen=True):
    """A bound socket, and the coroutines that have to run while it is open."""

    wire: Socket
    address: str
    guards: tuple[Guard, ...] = ()


def open_router(context: Context, stack: ExitStack) -> Socket:
    """Open a ROUTER socket. Sending to a peer that is gone raises; closing waits for nothing."""
    wire = stack.enter_context(context.socket(zmq.ROUTER))
    wire.setsockopt(zmq.ROUTER_MANDATORY, 1)
    wire.setsockopt(zmq.LINGER, 0)
    return wire


def open_port(
    context: Context, stack: ExitStack, bind: str | None, keys: str | None, bounds: PortBounds
) -> BoundPort:
    """Bind a ROUTER socket: a unix socket in a private folder, or at `bind`. With `keys`, a folder, only
    clients with an accepted key can connect."""
    if bind is None:
        bind = stack.enter_context(private_address("clients"))
    elif bind.startswith(IPC):
        stack.enter_context(_own_socket(Path(bind.removeprefix(IPC))))
    wire = open_router(context, stack)
    wire.setsockopt(zmq.MAXMSGSIZE, bounds.max_bytes)
    wire.setsockopt(zmq.RCVHWM, bounds.max_unread)
    wire.setsockopt(zmq.SNDHWM, bounds.max_unsent)
    wire.setsockopt(zmq.IPV6, "[" in bind)
    guards: tuple[Guard, ...] = ()
    if keys:
        server_keys = read_server_keys(Path(keys))
        authenticator = AsyncioAuthenticator(context)
        authenticator.start()
        stack.callback(authenticator.stop)
        authenticator.configure_curve_callback("*", AcceptedKeys(server_keys.clients))
        server_keys.secure(wire)
        monitor = stack.enter_context(wire.get_monitor_socket(REFUSALS))
        stack.callback(wire.disable_monitor)
        guards = (lambda: count_refused(monitor),)
    try:
        wire.bind(bind)
    except zmq.ZMQError as error:
        reason = os.strerror(error.errno or 0)
        raise PortError(f"{bind} cannot be bound: {reason}; choose another address") from None
    return BoundPort(wire, wire.getsockopt_string(zmq.LAST_ENDPOINT), guards)


async def send_to(wire: Socket, peer: bytes, message: bytes, frame: Any = None) -> bool:
    """Send a message, and a raw frame behind it. Return False if the peer is gone or does not read."""
    parts = [peer, message] if frame is None else [peer, message, frame]
    try:
        await wire.send_multipart(parts, copy=frame is None, flags=zmq.NOBLOCK)
    except zmq.ZMQError as error:
        if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
            raise
        return False
    return True


@contextmanager
def _own_socket(path: Path) -> Iterator[None]:
    """Make the folder of a socket private, and refuse a socket at which a server listens. ZeroMQ would
    take it over without a word."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = path.parent.stat()
    if folder.st_uid != os.getuid() or folder.st_mode & 0o077:
        raise PortError(
            f"{path.parent} can be entered by others, who could connect to the socket in it: "
            "chmod 700 it, or choose another folder"
        )
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            pass
        else:
            raise PortError(
                f"another server listens at {IPC}{path}; end it, or choose another --bind"
            )
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


PREFIX = "rollway-ipc-"
SHORT_FOLDER = Path("/tmp")
"""Used if the temporary folder's path is too long: a unix socket's path has about 100 bytes."""
NEW_S = 10.0
"""A socket this new is never removed, because it has a name for a moment before anything listens."""


@contextmanager
def private_address(name: str) -> Iterator[str]:
    """Yield the address of a unix socket in a new folder that only this user may enter. Both are removed
    at the end. Folders that killed processes left behind are removed first."""
    parent = Path(tempfile.gettempdir())
    longest = parent / f"{PREFIX}{8 * 'x'}" / name
    if len(os.fsencode(longest)) > zmq.IPC_PATH_MAX_LEN:
        parent = SHORT_FOLDER
    for path in parent.glob(f"{PREFIX}*/{name}"):
        if _is_left_behind(path):
            shutil.rmtree(path.parent, ignore_errors=True)
    with tempfile.TemporaryDirectory(
        prefix=PREFIX, dir=parent, ignore_cleanup_errors=True
    ) as folder:
        yield f"{IPC}{folder}/{name}"


def _is_left_behind(path: Path) -> bool:
    """Return whether this is a socket of this user at which nothing listens any more."""
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
