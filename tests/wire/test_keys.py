"""Key files: what is written, what is refused, and what is said about it."""

import stat
from pathlib import Path

import pytest

from rollway.errors import KeysError
from rollway.wire.keys import client_keys, make, public_keys, server_keys


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_both_sides_know_each_other_and_secrets_are_private(tmp_path: Path) -> None:
    server, client = make(tmp_path / "keys")
    ours, theirs = server_keys(server), client_keys(client)
    assert theirs.server == ours.public
    assert ours.clients == {theirs.public}
    assert mode(server / "secret.key") == mode(client / "secret.key") == 0o600
    assert mode(server) == mode(client) == 0o700


def test_secrets_stay_out_of_what_is_shown(tmp_path: Path) -> None:
    server, client = make(tmp_path)
    ours, theirs = server_keys(server), client_keys(client)
    shown = "\n".join([*public_keys(tmp_path).values(), repr(ours), repr(theirs)])
    assert ours.public.decode() in shown
    assert theirs.public.decode() in shown
    assert ours.secret.decode() not in shown
    assert theirs.secret.decode() not in shown


def test_keys_are_never_overwritten(tmp_path: Path) -> None:
    server, _ = make(tmp_path)
    before = (server / "secret.key").read_bytes()
    with pytest.raises(KeysError, match="server exists; keys are not overwritten"):
        make(tmp_path)
    assert (server / "secret.key").read_bytes() == before


def test_a_secret_that_others_can_read_is_refused(tmp_path: Path) -> None:
    _, client = make(tmp_path)
    (client / "secret.key").chmod(0o640)
    with pytest.raises(KeysError, match="can be read by others: run 'chmod 600"):
        client_keys(client)


def test_the_wrong_folder_is_met_with_the_right_one(tmp_path: Path) -> None:
    server, client = make(tmp_path)
    with pytest.raises(KeysError, match=f"did you mean {server}"):
        server_keys(tmp_path)
    with pytest.raises(KeysError, match=f"holds no server.public.*did you mean {client}"):
        client_keys(server)
    with pytest.raises(KeysError, match=f"nobody could connect; did you mean {server}"):
        server_keys(client)
    with pytest.raises(KeysError, match="'rollway keys new keys' makes them"):
        public_keys(tmp_path / "none")


@pytest.mark.parametrize(
    "content", [b"", b"short\n", b"x" * 41, b"\xff" * 40, b"#" * 40, b"a" * 20 + b"\n" + b"a" * 20]
)
def test_what_is_no_key_is_named(tmp_path: Path, content: bytes) -> None:
    server, client = make(tmp_path)
    (client / "server.public").write_bytes(content)
    with pytest.raises(KeysError, match=r"server\.public holds no key: one is 40 characters"):
        client_keys(client)
    (server / "clients" / "odd.public").write_bytes(content)
    with pytest.raises(KeysError, match=r"odd\.public holds no key"):
        server_keys(server)
