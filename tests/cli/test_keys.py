"""`rollway keys` as a user runs it."""

from functools import partial
from pathlib import Path

import pytest
from tests.doubles.command import Rollway


@pytest.fixture
def keys(rollway: Rollway) -> Rollway:
    return partial(rollway, "keys")


def test_new_never_overwrites_keys_and_show_prints_public_keys_only(
    tmp_path: Path, keys: Rollway
) -> None:
    folder = tmp_path / "keys"
    made = keys("new", folder)
    assert made.code == 0, made.err
    assert f"--keys {folder}/server" in made.out
    shown = keys("show", folder)
    secrets = [
        (folder / side / "secret.key").read_text().strip() for side in ("server", "client")
    ]
    assert not [secret for secret in secrets if secret in shown.out + made.out]
    server = (folder / "client" / "server.public").read_text().strip()
    client = (folder / "server" / "clients" / "client.public").read_text().strip()
    assert shown.out.count(server) == shown.out.count(client) == 2
    again = keys("new", folder)
    assert again.code == 1
    assert again.err == (
        f"rollway: {folder}/server exists; keys are not overwritten: choose another folder\n"
    )
    assert keys("show", folder).out == shown.out


def test_show_says_how_to_make_keys_if_there_are_none(tmp_path: Path, keys: Rollway) -> None:
    shown = keys("show", tmp_path)
    assert shown.code == 1
    assert "holds no keys; 'rollway keys new keys' makes them" in shown.err
