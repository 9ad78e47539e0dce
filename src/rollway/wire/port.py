"""A socket that others connect to: bounded in what it takes from each, and guarded where it has keys."""

import os
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import zmq
from msgspec import Struct

from ..errors import PortError
from .gate import REFUSALS, Gate, count_refused
from .keys import server_keys


class Port(Struct, frozen=True):
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
    context: Any, stack: ExitStack, bind: str, keys: str, *, max_bytes: int, max_unread: int,
    max_unsent: int,
) -> Port:  # fmt: skip
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
    return Port(wire, wire.getsockopt(zmq.LAST_ENDPOINT).decode(), guards)
