"""The help of every command: complete as written, and with the same words for the same things."""

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from rollway.cli.main import make_app
from rollway.config.sections import EngineConfig


def commands(
    command: Any, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, command
    for name, child in getattr(command, "commands", {}).items():
        yield from commands(child, (*path, name))


COMMANDS = dict(commands(get_command(make_app())))
LEAVES = {
    path: command for path, command in COMMANDS.items() if not hasattr(command, "commands")
}


def squeeze(text: str) -> str:
    """Without white space, which depends on the width of the terminal."""
    return re.sub(r"\s+", "", text)


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_help_shows_every_text_as_written(path: tuple[str, ...]) -> None:
    """Text in brackets, such as [transport.zmq], must not be taken for markup."""
    shown = CliRunner().invoke(make_app(), [*path, "--help"])
    assert shown.exit_code == 0
    command = COMMANDS[path]
    texts = [
        command.help,
        *(parameter.help for parameter in command.params if parameter.name != "help"),
    ]
    for text in texts:
        assert squeeze(inspect.cleandoc(text)) in squeeze(shown.output)


def test_brackets_are_in_some_help_text() -> None:
    """Otherwise the test above could not fail."""
    assert [
        path
        for path, command in LEAVES.items()
        if re.search(r"\[[\w.]+\]", command.help or "")
    ]


@pytest.mark.parametrize("path", LEAVES, ids=" ".join)
def test_every_option_has_a_help_text_that_is_a_sentence(path: tuple[str, ...]) -> None:
    for parameter in LEAVES[path].params:
        if parameter.name != "help":
            assert re.match(r"[A-Z].*\.$", parameter.help or "", re.DOTALL), parameter.name


def options(*path: str) -> dict[str, Any]:
    return {
        option: parameter for parameter in LEAVES[path].params for option in parameter.opts
    }


def test_options_are_called_like_the_keys_of_a_run_file() -> None:
    evaluate, serve, engine = options("eval"), options("serve"), options("engine")
    assert {
        "--correct-at",
        "--engine-url",
        "--rollout-deadline-s",
        "--key-var",
    } <= evaluate.keys()
    assert {"--engine-url", "--rollout-deadline-s"} <= serve.keys()
    for command in (evaluate, serve, options("doctor")):
        assert {"--model", "-m"} <= command.keys()
    assert evaluate["--max-context"].default == EngineConfig().embedded_context
    assert engine["--max-context"].default == EngineConfig().max_context


@pytest.mark.parametrize("option", ["--max-batch", "--threads", "--max-context"])
def test_a_wrong_value_is_refused_under_the_name_of_its_option(
    tiny_moe: Path, option: str
) -> None:
    refused = CliRunner().invoke(make_app(), ["engine", str(tiny_moe), option, "0"])
    assert str(refused.exception) == f"{option} 0: expected a whole number, at least 1"
