"""Every block of Python, TOML and shell in the documentation is right as printed."""

import ast
import importlib
import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
from tests.docs.pages import ROOT, Block, Line, blocks, commands
from typer.main import get_command

from rollway.cli.main import make_app
from rollway.config.load import check, load
from rollway.config.plan import plan
from rollway.config.sections import RunConfig
from rollway.orchestrator.core.commands import Credit
from rollway.orchestrator.shell.advantage import credit
from rollway.records.ids import GroupId

PLAYED = {"README.md", "docs/environments.md"}
"""Pages whose Python is environments: tests/envs/test_docs.py plays them."""
SHELL = {"export", "tail", "make", "source"}
"""Commands that need nothing but a shell."""
MINIMAL = {"name": "minimal", "model": {"path": "m"}, "env": [{"id": "reverse-text"}]}
"""What every run file has, for blocks that show a part of one."""


def label(item: Block | Line) -> str:
    return item.label


PYTHON = [block for block in blocks("python") if block.page not in PLAYED]
NEEDS = "# needs "
NOT_RUN = [block for block in PYTHON if block.text.startswith(NEEDS)]
RUN = [block for block in PYTHON if not block.text.startswith(NEEDS)]


@pytest.mark.parametrize("block", NOT_RUN, ids=label)
def test_python_that_cannot_run_here_imports_names_that_exist(block: Block) -> None:
    tree = ast.parse(block.text)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            module = importlib.import_module(node.module)
            assert all(hasattr(module, alias.name) for alias in node.names)


@pytest.mark.parametrize("block", RUN, ids=label)
def test_python_runs(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that is not an environment is an advantage function."""
    (tmp_path / "my_credit.py").write_text(block.text)
    (name,) = [
        name
        for name in runpy.run_path(str(tmp_path / "my_credit.py"))
        if not name.startswith("_")
    ]
    monkeypatch.chdir(tmp_path)
    advantages = credit(
        f"my_credit.py:{name}", Credit(GroupId(0), (0.0, 1.0), (1000, 250), (1, 1))
    )
    assert advantages == (-0.25, 0.5)


@pytest.mark.parametrize("block", blocks("toml"), ids=label)
def test_toml_is_a_run_file_or_a_package(block: Block) -> None:
    tree = tomllib.loads(block.text)
    if "project" in tree:
        (group,) = tree["project"]["entry-points"]
        ours = tomllib.loads((ROOT / "pyproject.toml").read_text())
        assert group in ours["project"]["entry-points"]
        return
    config = check({**MINIMAL, **tree}, source=block.label)
    plan(config)
    assert differs(config), "the block shows only defaults"


def differs(config: RunConfig) -> bool:
    return msgspec.to_builtins(config) != msgspec.to_builtins(
        check(MINIMAL, source="minimal")
    )


def rollway_commands() -> list[Line]:
    return [line for line in commands() if line.program == "rollway"]


@pytest.mark.parametrize("line", rollway_commands(), ids=label)
def test_options_of_a_command_exist(line: Line) -> None:
    """The command is parsed and not run."""
    command: Any = get_command(make_app())
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
    "line",
    [line for line in commands() if line.program not in {"rollway", *SHELL}],
    ids=label,
)
def test_a_command_that_cannot_run_here_says_what_it_needs(line: Line) -> None:
    assert line.block.needs, "say why with a comment '# needs …' in the block"


def test_make_has_the_targets_that_pages_name() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = [word for line in commands() if line.program == "make" for word in line.args]
    assert named
    assert {word for word in named if "=" not in word} <= set(targets)


def test_the_diff_for_a_new_key_applies_and_is_enough(tmp_path: Path) -> None:
    """CONTRIBUTING says that a key of the orchestrator touches two files: this is its example."""
    (block,) = blocks("diff")
    shutil.copytree(
        ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__")
    )
    subprocess.run(
        ["git", "apply", "-"], cwd=tmp_path, input=block.text, text=True, check=True
    )
    assert len(re.findall(r"^\+\+\+ ", block.text, re.MULTILINE)) == 2
    code = (
        "from rollway.config.load import check;"
        "tree = {'name': 'x', 'model': {'path': 'm'}, 'env': [{'id': 'e'}]};"
        "print(check({**tree, 'orchestrator': {'min_scored': 3}}, 'x').orchestrator.min_scored)"
    )
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "src")}
    result = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "3"
