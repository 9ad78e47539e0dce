"""The two ports of a router: one for clients, guarded; one for its own workers, private."""

import os
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import zmq
from msgspec import Struct

from ..config.address import check_bind
from ..errors import PortError
from ..wire.gate import REFUSALS, Gate, count_refused
from ..wire.keys import server_keys
from ..wire.messages import MAX_CLIENT_BYTES
from ..wire.private import private_address

MAX_UNREAD = 100
"""Messages of one client that lie here unread; its further ones wait with it."""
MAX_UNSENT = 65_536
"""Messages that wait for one client; one that leaves so many unread is taken for gone."""


class Port(Struct, frozen=True):
    """A bound socket, and what has to run as long as it is open."""

    wire: Any
    address: str
    guards: tuple[Callable[[], Coroutine[Any, Any, None]], ...] = ()


def open_workers(context: Any, stack: ExitStack) -> Port:
    """Where workers connect, and nobody else can. It never drops for being full: credits bound it."""
    wire = _router(context, stack)
    wire.setsockopt(zmq.SNDHWM, 0)
    address = stack.enter_context(private_address("workers"))
    wire.bind(address)
    return Port(wire, address)


def open_clients(context: Any, stack: ExitStack, bind: str, keys: str) -> Port:
    """Where clients connect. What one may send, and what may wait for it, is bounded. With keys only
    those who hold an accepted one get a word in; beyond this machine there must be keys."""
    check_bind(bind, keys)
    wire = _router(context, stack)
    wire.setsockopt(zmq.MAXMSGSIZE, MAX_CLIENT_BYTES)
    wire.setsockopt(zmq.RCVHWM, MAX_UNREAD)
    wire.setsockopt(zmq.SNDHWM, MAX_UNSENT)
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
    return Port(wire, wire.getsockopt(zmq.LAST_ENDPOINT).decode(), guards)


def _router(context: Any, stack: ExitStack) -> Any:
    wire = stack.enter_context(context.socket(zmq.ROUTER))
    wire.setsockopt(zmq.ROUTER_MANDATORY, 1)
    wire.setsockopt(zmq.LINGER, 0)
    return wire
