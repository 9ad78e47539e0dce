"""Key files: which are written, which are refused, and with which message."""

import stat
from pathlib import Path

import pytest

from rollway.errors import CurveKeysError
from rollway.wire.keys import make_keys, read_client_keys, read_public_keys, read_server_keys


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_both_sides_know_each_other_and_secrets_are_private(tmp_path: Path) -> None:
    server, client = make_keys(tmp_path / "keys")
    server_keys, client_keys = read_server_keys(server), read_client_keys(client)
    assert client_keys.server == server_keys.public
    assert server_keys.clients == {client_keys.public}
    assert mode(server / "secret.key") == mode(client / "secret.key") == 0o600
    assert mode(server) == mode(client) == 0o700


def test_secrets_are_never_shown(tmp_path: Path) -> None:
    server, client = make_keys(tmp_path)
    server_keys, client_keys = read_server_keys(server), read_client_keys(client)
    shown = "\n".join(
        [*read_public_keys(tmp_path).values(), repr(server_keys), repr(client_keys)]
    )
    for keys in (server_keys, client_keys):
        assert keys.public.decode() in shown
        assert keys.secret.decode() not in shown


def test_keys_are_never_overwritten(tmp_path: Path) -> None:
    server, _ = make_keys(tmp_path)
    before = (server / "secret.key").read_bytes()
    with pytest.raises(CurveKeysError, match="server exists; keys are not overwritten"):
        make_keys(tmp_path)
    assert (server / "secret.key").read_bytes() == before


def test_a_secret_that_others_can_read_is_refused(tmp_path: Path) -> None:
    _, client = make_keys(tmp_path)
    (client / "secret.key").chmod(0o640)
    with pytest.raises(CurveKeysError, match="can be read by others: run 'chmod 600"):
        read_client_keys(client)


def test_the_error_about_a_wrong_folder_names_the_right_one(tmp_path: Path) -> None:
    server, client = make_keys(tmp_path)
    with pytest.raises(CurveKeysError, match=f"did you mean {server}"):
        read_server_keys(tmp_path)
    with pytest.raises(
        CurveKeysError, match=f"holds no server.public.*did you mean {client}"
    ):
        read_client_keys(server)
    with pytest.raises(
        CurveKeysError, match=f"so no client could connect; did you mean {server}"
    ):
        read_server_keys(client)
    with pytest.raises(CurveKeysError, match="'rollway keys new keys' makes them"):
        read_public_keys(tmp_path / "none")


@pytest.mark.parametrize(
    "content",
    [b"", b"short\n", b"x" * 41, b"\xff" * 40, b"#" * 40, b"a" * 20 + b"\n" + b"a" * 20],
)
def test_a_file_that_does_not_hold_a_key_is_named(tmp_path: Path, content: bytes) -> None:
    server, client = make_keys(tmp_path)
    (client / "server.public").write_bytes(content)
    with pytest.raises(
        CurveKeysError, match=r"server\.public does not hold a key: a key is one line of 40"
    ):
        read_client_keys(client)
    (server / "clients" / "odd.public").write_bytes(content)
    with pytest.raises(CurveKeysError, match=r"odd\.public does not hold a key"):
        read_server_keys(server)
