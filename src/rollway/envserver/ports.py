"""The two ports of a router: one for clients, guarded; one for its own workers, private."""

from contextlib import ExitStack
from typing import Any

import zmq

from ..config.address import check_bind
from ..wire.messages import MAX_CLIENT_BYTES
from ..wire.port import Port, open_port, open_router
from ..wire.private import private_address

MAX_UNREAD = 100
"""Messages of one client that lie here unread; its further ones wait with it."""
MAX_UNSENT = 65_536
"""Messages that wait for one client; one that leaves so many unread is taken for gone."""


def open_workers(context: Any, stack: ExitStack) -> Port:
    """Where workers connect, and nobody else can. It never drops for being full: credits bound it."""
    wire = open_router(context, stack)
    wire.setsockopt(zmq.SNDHWM, 0)
    address = stack.enter_context(private_address("workers"))
    wire.bind(address)
    return Port(wire, address)


def open_clients(context: Any, stack: ExitStack, bind: str, keys: str) -> Port:
    """Where clients connect. What one may send, and what may wait for it, is bounded; beyond this
    machine there must be keys."""
    check_bind(bind, keys)
    return open_port(
        context, stack, bind, keys,
        max_bytes=MAX_CLIENT_BYTES, max_unread=MAX_UNREAD, max_unsent=MAX_UNSENT,
    )  # fmt: skip
