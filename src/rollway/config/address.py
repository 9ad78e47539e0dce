"""Addresses of servers: which stay on this machine, and what others require."""

import re
from ipaddress import ip_address

from ..errors import ConfigError

ANY_LOOPBACK_PORT = "tcp://127.0.0.1:*"
_TCP = re.compile(r"tcp://(?P<host>\[[0-9A-Fa-f:]+\]|[A-Za-z0-9._*-]+):(?P<port>\d{1,5}|\*)")
KEYS_HELP = (
    "run 'rollway keys new keys', give keys/server to the server and keys/client to whoever connects"
)


def host_of(address: str, what: str) -> str:
    """The host of `tcp://host:port`; `what` names the option for whoever wrote something else."""
    found = _TCP.fullmatch(address)
    if found is None or (found["port"] != "*" and int(found["port"]) > 65535):
        raise ConfigError(
            f"{what} = '{address}': expected tcp://HOST:PORT, such as tcp://127.0.0.1:5555"
        )
    return found["host"].strip("[]")


def is_loopback(address: str, what: str) -> bool:
    """Whether only processes of this machine can reach it."""
    host = host_of(address, what)
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_bind(
    address: str, keys: str | None, bind_option: str = "--bind", keys_option: str = "--keys"
) -> None:
    """A server that other machines can reach must have keys."""
    if not is_loopback(address, bind_option) and not keys:
        raise ConfigError(
            f"{bind_option} {address} lets other machines connect, and nothing would keep them from "
            f"running code here: {keys_option} is required; {KEYS_HELP}"
        )


def check_connect(address: str, keys: str | None, where: str) -> None:
    """A server beyond this machine has keys, so its clients need some."""
    if not is_loopback(address, f"'{where}.address'") and not keys:
        raise ConfigError(
            f"'{where}.address' = '{address}' is on another machine, where servers require keys: set "
            f"'{where}.keys'; {KEYS_HELP}"
        )
