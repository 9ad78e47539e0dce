"""Addresses of servers: which stay on this machine, and what others require."""

import re
from ipaddress import ip_address

from ..errors import ConfigError

ANY_LOOPBACK_PORT = "tcp://127.0.0.1:*"
_TCP = re.compile(r"tcp://(?P<host>\[[0-9A-Fa-f:]+\]|[A-Za-z0-9._*-]+):(?P<port>\d{1,5}|\*)")
KEYS_HELP = "run 'rollway keys new keys', give keys/server to the server and keys/client to its clients"


def is_loopback(address: str, option: str) -> bool:
    """Return True if only processes of this machine can reach the address."""
    found = _TCP.fullmatch(address)
    if found is None or (found["port"] != "*" and int(found["port"]) > 65535):
        example = "tcp://127.0.0.1:5555"
        raise ConfigError(
            f"{option} = '{address}': expected tcp://HOST:PORT, such as {example}"
        )
    host = found["host"].strip("[]")
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_bind(
    address: str, keys: str | None, bind_option: str = "--bind", keys_option: str = "--keys"
) -> None:
    """Refuse a server without keys that other machines can reach."""
    if not is_loopback(address, bind_option) and not keys:
        raise ConfigError(
            f"{bind_option} {address} lets other machines connect, and nothing would keep them from "
            f"running code here: {keys_option} is required; {KEYS_HELP}"
        )


def check_connect(address: str, keys: str | None, where: str) -> None:
    """Refuse to connect to a server on another machine without keys, because it requires them."""
    if not is_loopback(address, f"'{where}.address'") and not keys:
        raise ConfigError(
            f"'{where}.address' = '{address}' is on another machine, where servers require keys: set "
            f"'{where}.keys'; {KEYS_HELP}"
        )
