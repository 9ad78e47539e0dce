"""Every block of Python, TOML and shell in the documentation is right as printed."""

import ast
import importlib
import re
import runpy
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
from tests.docs.pages import ROOT, Block, Line, blocks, commands
from typer.main import get_command

from rollway.cli.main import app
from rollway.config.load import check, load
from rollway.config.plan import plan
from rollway.config.sections import RunConfig
from rollway.orchestrator.core.commands import Credit
from rollway.orchestrator.shell.advantage import credit
from rollway.records.ids import GroupId

PLAYED = {"README.md", "docs/environments.md"}
"""Pages whose Python is environments: tests/envs/test_docs.py plays them."""
SHELL = {"export", "tail", "make"}
"""Commands that need nothing but a shell."""
LEAST = {"name": "least", "model": {"path": "m"}, "env": [{"id": "reverse-text"}]}
"""What every run file has, for blocks that show a part of one."""


def label(one: Block | Line) -> str:
    return one.label


PYTHON = [one for one in blocks("python") if one.page not in PLAYED]
NEEDS = "# needs "


@pytest.mark.parametrize("block", [one for one in PYTHON if one.text.startswith(NEEDS)], ids=label)
def test_python_that_needs_something_else_imports_what_there_is(block: Block) -> None:
    tree = ast.parse(block.text)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            module = importlib.import_module(node.module)
            assert all(hasattr(module, alias.name) for alias in node.names)


@pytest.mark.parametrize("block", [one for one in PYTHON if not one.text.startswith(NEEDS)], ids=label)
def test_python_runs(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is no environment is a function for advantages."""
    (tmp_path / "my_credit.py").write_text(block.text)
    (name,) = [
        name for name in runpy.run_path(str(tmp_path / "my_credit.py")) if not name.startswith("_")
    ]
    monkeypatch.chdir(tmp_path)
    given = credit(f"my_credit.py:{name}", Credit(GroupId(0), (0.0, 1.0), (1000, 250), (1, 1)))
    assert given == (-0.25, 0.5)


@pytest.mark.parametrize("block", blocks("toml"), ids=label)
def test_toml_is_a_run_file_or_a_package(block: Block) -> None:
    tree = tomllib.loads(block.text)
    if "project" in tree:
        (group,) = tree["project"]["entry-points"]
        ours = tomllib.loads((ROOT / "pyproject.toml").read_text())
        assert group in ours["project"]["entry-points"]
        return
    config = check({**LEAST, **tree}, source=block.label)
    if not any(env.address and env.keys for env in config.env):
        plan(config)  # keys are looked for when a run starts
    assert differs(config), "it shows nothing but defaults"


def differs(config: RunConfig) -> bool:
    return msgspec.to_builtins(config) != msgspec.to_builtins(check(LEAST, source="least"))


def rollway_commands() -> list[Line]:
    return [line for line in commands() if line.program == "rollway"]


@pytest.mark.parametrize("line", rollway_commands(), ids=label)
def test_options_of_a_command_exist(line: Line) -> None:
    """Parsed as the command line is, and not carried out."""
    command: Any = get_command(app)
    args, context = line.args, None
    while hasattr(command, "commands"):
        context = typer.Context(command, parent=context)
        name, command, args = command.resolve_command(context, args)
        assert command is not None, name
    parsed = command.make_context(command.name, args, parent=context)
    assert not parsed.args
    overrides = parsed.params.get("overrides") or []
    if overrides:
        load(ROOT / "examples" / "reverse-text" / "run.toml", overrides)


@pytest.mark.parametrize(
    "line", [one for one in commands() if one.program not in {"rollway", *SHELL}], ids=label
)
def test_what_cannot_be_run_here_says_what_it_needs(line: Line) -> None:
    assert line.block.needs, "say why with a comment '# needs …' in the block"


def test_make_has_the_targets_that_are_named() -> None:
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = [word for line in commands() if line.program == "make" for word in line.args]
    assert named
    assert {word for word in named if "=" not in word} <= set(targets)
