"""Passwords in URLs are used, and shown nowhere."""

import base64
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from rollway.cli.checks import json_object
from rollway.config.credentials import (
    VARIABLE,
    authorization,
    hide_credentials,
    without_credentials,
)
from rollway.config.load import check, load
from rollway.config.terms import terms_of_server
from rollway.errors import ConfigError
from rollway.rundir.rundir import RunDir


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


@pytest.mark.parametrize(
    "user_info", ["me:se/cret", "me:s@cret", "me:s/e@c/r@t", "me:p#?t", "token", "me:80x/1"]
)
@pytest.mark.parametrize("host", ["host:8000/v1", "[::1]:8000/v1", "host"])
def test_passwords_with_any_characters_are_found(user_info: str, host: str) -> None:
    url = f"https://{user_info}@{host}"
    assert (
        hide_credentials(f"at {url}, and {url}")
        == f"at https://***@{host}, and https://***@{host}"
    )
    assert without_credentials(url) == f"https://{host}"
    expected = base64.b64encode(user_info.encode()).decode()
    assert authorization(f"https://{host}") == f"Basic {expected}"


@pytest.mark.parametrize(
    "url",
    ["http://host:8000/a@b", "http://host/a@b", "http://[::1]:8/a@b", "http://h?q=a@b",
     "ipc:///tmp/a@b", "mail me@host", "http://host:8000", "http://"],
)  # fmt: skip
def test_what_only_looks_like_a_password_stays(url: str) -> None:
    assert hide_credentials(url) == without_credentials(url) == url


def test_every_url_of_a_text_is_hidden() -> None:
    urls = '["http://a:b@h:1","redis://c:d/e@h:2"]'
    assert hide_credentials(urls) == '["http://***@h:1","redis://***@h:2"]'


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


def test_passwords_in_arguments_are_used_and_not_shown(tmp_path: Path) -> None:
    url = "http://me:secret@judge:8000"
    args = {"judge": url, "others": [{url: (url, 7)}]}
    tree = {
        "name": "x",
        "model": {"path": "m"},
        "env": [{"id": "reverse-text", "args": args}],
    }
    config = check(tree, "run.toml")
    assert config.env[0].args["judge"] == url
    run = RunDir(tmp_path)
    run.create(config)
    written = tomllib.loads(run.config.read_text())
    hidden = "http://***@judge:8000"
    expected = {"judge": hidden, "others": [{hidden: [hidden, 7]}]}
    assert written["env"][0]["args"] == expected
    terms = terms_of_server(config.env[0], config.model, config.engine, 0, ("files", "host"))
    assert "secret" not in str(terms)
    assert hidden in terms["env.args"]


MINIMAL = {"name": "x", "model": {"path": "m"}, "env": [{"id": "reverse-text"}]}
SECRET = "http://me:sec/ret@host:1"


@pytest.mark.parametrize(
    "change",
    [{"engine": {"url": SECRET}}, {"engine": {"url": [SECRET]}}, {"seed": SECRET},
     {"payload": {"store": SECRET}}],
)  # fmt: skip
def test_errors_of_a_run_file_show_no_password(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"http://\*\*\*@host:1") as raised:
        check({**MINIMAL, **change}, "run.toml")
    assert "ret@" not in str(raised.value)


@pytest.mark.parametrize("key", ["engine.url", "env.7.args.url", "name.x", "engine..url"])
def test_errors_of_an_override_show_no_password(key: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(tomli_w.dumps(MINIMAL))
    with pytest.raises(ConfigError, match=r"http://\*\*\*@host:1") as raised:
        load(path, [f"{key}={SECRET}"])
    assert "ret@" not in str(raised.value)


def test_errors_of_options_show_no_password() -> None:
    with pytest.raises(ConfigError, match=r"http://\*\*\*@host:1"):
        json_object("--args", f"{{url: {SECRET}}}")


def test_a_command_that_is_shown_has_no_password() -> None:
    shown = hide_credentials("--set engine.external.url=http://me:secret@host:1")
    assert shown == "--set engine.external.url=http://***@host:1"
