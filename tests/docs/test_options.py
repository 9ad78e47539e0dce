"""docs/running.md says which option of a command stands for which key of the run file."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import Struct
from tests.docs.pages import PAGES, ROOT
from typer.main import get_command

from rollway.cli.main import make_app
from rollway.config.sections import RunConfig

COMMANDS = ("eval", "serve", "engine")
"""The commands with options that stand for keys. Others take a run file."""
OF_THE_SERVER = {("serve", "--bind"), ("serve", "--keys"), ("serve", "--env")}
"""Options that are called like keys of a run file, but describe the other side of a connection."""

PLACEHOLDERS = {"section.key", "env.key"}
"""Names with which docs/configuration.md explains `--set`."""


class Row(Struct, frozen=True):
    """One row of a table: a key, its option, and the commands that take the option."""

    key: str
    option: str
    commands: tuple[str, ...]

    @property
    def follows_the_rule(self) -> bool:
        return self.option == option_of(self.key)


def option_of(key: str) -> str:
    return "--" + key.rpartition(".")[2].replace("_", "-")


def read_tables() -> list[list[Row]]:
    """Return the tables of the section, with their rows."""
    page = (ROOT / "docs" / "running.md").read_text()
    section = page.partition("\n## Options and keys\n")[2].partition("\n## ")[0]
    tables = section.split("| key | option | commands |\n")[1:]
    rows = re.compile(r"^\| `([a-z_.]+)` \| `(--[a-z-]+)` \| (.+) \|$", re.MULTILINE)
    return [
        [
            Row(key, option, tuple(re.findall(r"`(\w+)`", commands)))
            for key, option, commands in rows.findall(table)
        ]
        for table in tables
    ]


BY_RULE, EXCEPTIONS = read_tables()


def keys_of(kind: Any, path: str = "") -> Iterator[str]:
    """Yield every key of a section and of the sections in it, as `section.key`."""
    match kind:
        case msgspec.inspect.StructType(fields=fields):
            for field in fields:
                name = f"{path}{field.encode_name}"
                yield name
                yield from keys_of(field.type, f"{name}.")
        case msgspec.inspect.VarTupleType(item_type=item):
            yield from keys_of(item, path)
        case msgspec.inspect.UnionType(types=types):
            for member in types:
                yield from keys_of(member, path)


KEYS = set(keys_of(msgspec.inspect.type_info(RunConfig)))


def options(command: str) -> set[str]:
    commands: Any = get_command(make_app())
    return {
        option for parameter in commands.commands[command].params for option in parameter.opts
    }


@pytest.mark.parametrize(
    "row", [*BY_RULE, *EXCEPTIONS], ids=lambda row: f"{row.key} {row.option}"
)
def test_the_key_and_the_option_exist(row: Row) -> None:
    assert row.key in KEYS
    assert row.commands
    assert all(row.option in options(command) for command in row.commands)


def test_only_the_exceptions_break_the_rule() -> None:
    assert [row.option for row in BY_RULE if not row.follows_the_rule] == []
    names = {row.option for row in EXCEPTIONS if row.follows_the_rule}
    assert names <= {row.option for row in BY_RULE}, "the same name with the same meaning"


def test_no_option_that_follows_the_rule_is_missing() -> None:
    listed = {(name, row.option) for row in [*BY_RULE, *EXCEPTIONS] for name in row.commands}
    by_rule = {option_of(key) for key in KEYS}
    found = {(name, option) for name in COMMANDS for option in options(name) & by_rule}
    assert found - listed == OF_THE_SERVER


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_key_that_a_page_sets_exists(page: Path) -> None:
    named = re.findall(r"--set ([a-z_.0-9]+)=", page.read_text())
    keys = {re.sub(r"^env\.\d+\.", "env.", key) for key in named}
    assert keys - KEYS - PLACEHOLDERS == set()
