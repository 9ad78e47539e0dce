"""`rollway keys` as a user runs it."""

import subprocess
import sys
from pathlib import Path


def keys(*args: str | Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "rollway", "keys", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_new_writes_once_and_show_prints_what_is_public(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    made = keys("new", folder)
    assert made.returncode == 0, made.stderr
    assert f"--keys {folder}/server" in made.stdout
    shown = keys("show", folder)
    secrets = [(folder / side / "secret.key").read_text().strip() for side in ("server", "client")]
    assert not [secret for secret in secrets if secret in shown.stdout + made.stdout]
    server = (folder / "client" / "server.public").read_text().strip()
    client = (folder / "server" / "clients" / "client.public").read_text().strip()
    assert shown.stdout.count(server) == shown.stdout.count(client) == 2
    again = keys("new", folder)
    assert again.returncode == 1
    assert again.stderr == (
        f"rollway: {folder}/server exists; keys are not overwritten: choose another folder\n"
    )
    assert keys("show", folder).stdout == shown.stdout


def test_a_folder_without_keys_is_told_how_to_get_some(tmp_path: Path) -> None:
    shown = keys("show", tmp_path)
    assert shown.returncode == 1
    assert "holds no keys; 'rollway keys new keys' makes them" in shown.stderr
