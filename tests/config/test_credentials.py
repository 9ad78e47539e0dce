"""Passwords in URLs are used, and shown nowhere."""

import base64

import pytest

from rollway.config.credentials import (
    VARIABLE,
    authorization,
    hide_credentials,
    without_credentials,
)
from rollway.config.load import check


@pytest.fixture(autouse=True)
def forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "{}")


def test_a_password_in_a_url_proves_who_asks() -> None:
    url = without_credentials("https://me:p%40ss@host:8000/v1")
    assert url == "https://host:8000/v1"
    for same in (url, "https://host:8000", "https://host:8000/"):
        assert authorization(same) == f"Basic {base64.b64encode(b'me:p@ss').decode()}"
    assert authorization("https://other:8000") == ""
    assert without_credentials("http://host:8000/a@b") == "http://host:8000/a@b"


def test_a_run_file_loses_its_passwords_when_it_is_read() -> None:
    urls = ["http://me:secret@one:8000", "http://two:8000"]
    tree = {
        "name": "x", "model": {"path": "m"}, "env": [{"id": "reverse-text"}],
        "engine": {"external": {"url": urls}},
    }  # fmt: skip
    config = check(tree, "run.toml")
    assert "secret" not in repr(config)
    assert config.engine.urls == ("http://one:8000", "http://two:8000")
    assert authorization("http://one:8000")


def test_a_command_that_is_shown_has_no_password() -> None:
    shown = hide_credentials("--set engine.external.url=http://me:secret@host:1")
    assert shown == "--set engine.external.url=http://***@host:1"
