"""Ports demand keys, whoever can reach them. Unix sockets do not."""

import pytest

from rollway.config.address import check_bind, check_connect
from rollway.errors import ConfigError

PORTS = [
    "tcp://127.0.0.1:5555", "tcp://127.0.0.1:*", "tcp://[::1]:5555", "tcp://localhost:5555",
    "tcp://0.0.0.0:5555", "tcp://*:5555", "tcp://[::]:*",
]  # fmt: skip


@pytest.mark.parametrize("address", PORTS)
def test_a_port_without_keys_is_refused(address: str) -> None:
    """Also at the loopback address: other users of the machine can connect to it."""
    with pytest.raises(ConfigError, match=r"lets others connect.*: --keys is required"):
        check_bind(address, None)
    with pytest.raises(
        ConfigError, match=r"is a port, and ports require keys: set 'env\.keys'"
    ):
        check_connect(address, None, "env")
    check_bind(address, "keys")
    check_connect(address, "keys", "env")


def test_a_unix_socket_needs_no_keys() -> None:
    check_bind("ipc:///tmp/socket", None)
    check_bind(None, None)
    check_connect("ipc:///tmp/socket", None, "env")


@pytest.mark.parametrize(
    "address", ["127.0.0.1:5", "tcp://a", "tcp://a:99999", "http://a:1", "ipc://"]
)
def test_other_addresses_are_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="expected tcp://HOST:PORT"):
        check_bind(address, "keys")
