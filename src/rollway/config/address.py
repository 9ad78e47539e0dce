"""Addresses of servers: unix sockets, which only this user can reach, and TCP, which requires keys."""

import os
import re
import tempfile
from pathlib import Path

from ..errors import ConfigError

IPC = "ipc://"
MAX_SOCKET_BYTES = 100
"""A longer path of a unix socket is refused by some systems."""
_TCP = re.compile(r"tcp://(?:\[[0-9A-Fa-f:]+\]|[A-Za-z0-9._*-]+):(?P<port>\d{1,5}|\*)")
KEYS_HELP = "run 'rollway keys new keys', give keys/server to the server and keys/client to its clients"


def is_socket(address: str, option: str) -> bool:
    """Return True for a unix socket, and False for TCP. Refuse everything else."""
    if address.startswith(IPC) and len(address) > len(IPC):
        if len(os.fsencode(address)) > MAX_SOCKET_BYTES + len(IPC):
            raise ConfigError(
                f"{option} = '{address}': the path of a unix socket has at most {MAX_SOCKET_BYTES} bytes"
            )
        return True
    found = _TCP.fullmatch(address)
    if found is None or (found["port"] != "*" and int(found["port"]) > 65535):
        raise ConfigError(
            f"{option} = '{address}': expected tcp://HOST:PORT, such as tcp://127.0.0.1:5555, or ipc://PATH"
        )
    return False


def check_bind(
    address: str | None,
    keys: str | None,
    bind_option: str = "--bind",
    keys_option: str = "--keys",
) -> None:
    """Refuse a port without keys: all users of this machine could run code here, or others too."""
    if address is not None and not is_socket(address, bind_option) and not keys:
        raise ConfigError(
            f"{bind_option} {address} lets others connect, and nothing would keep them from running "
            f"code here: {keys_option} is required; {KEYS_HELP}"
        )


def check_connect(address: str, keys: str | None, where: str) -> None:
    """Refuse to connect to a port without keys, because every port requires them."""
    if not is_socket(address, f"'{where}.address'") and not keys:
        raise ConfigError(
            f"'{where}.address' = '{address}' is a port, and ports require keys: set '{where}.keys'; "
            f"{KEYS_HELP}"
        )


def socket_in(folder: Path) -> str:
    """Return the address of a unix socket in a folder, or the same one each time in a private folder for
    temporary files if the path is too long."""
    path = folder.absolute() / "socket"
    if len(os.fsencode(path)) > MAX_SOCKET_BYTES:
        name = "".join(c if c.isalnum() else "-" for c in str(path.parent))[-40:]
        path = Path(tempfile.gettempdir(), f"rollway-{os.getuid()}", f"{name}.socket")
    return f"{IPC}{path}"
